"""Which names say that their value is a secret."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from polytrain import trackers
from polytrain.config.configs import DataConfig, RunConfig, ScalingConfig
from polytrain.config.validation_config import ValidationConfig, ValidationTaskConfig
from polytrain.text.secret_names import is_secret, without_credentials_in
from polytrain_plugins import backend_names, load_backend


def _names(text: str) -> list[str]:
    return text.split()


SECRET = _names(
    """
    key api_key apikey apiKey API_KEY APIKey x-api-key --api-key api_keys wandb_key --wandb-key
    wandb_api_key WANDB_API_KEY WANDB_KEY wandbApiKey openai_api_key OPENAI_API_KEY openai_key
    ANTHROPIC_API_KEY comet_api_key NEPTUNE_API_TOKEN neptune_token CLEARML_API_SECRET_KEY
    HF_TOKEN hf_token hub_token --hub-token hfToken use_auth_token auth_token authToken
    oauth_token HUGGING_FACE_HUB_TOKEN token --token access_token accessToken access_tokens
    refresh_token bearer_token github_token GITHUB_TOKEN id_token MLFLOW_TRACKING_TOKEN
    MLFLOW_TRACKING_PASSWORD password passwd pwd db_password DB_PASSWORD dbPassword mysql_pwd
    smtp_password rootpassword user_password password2 passphrase ssh_passphrase secret
    client_secret clientSecret secrets secret_key secretKey SECRET_KEY secretkey
    AWS_SECRET_ACCESS_KEY aws_access_key access_key accesskey aws_session_token
    AWS_SECURITY_TOKEN private_key privatekey ssh_key ssh_private_key signing_key encryption_key
    account_key AZURE_STORAGE_KEY storage_key connection_string AZURE_STORAGE_CONNECTION_STRING
    sas_token master_key license_key subscription_key session_key service_account_key credential
    credentials gcp_credentials aws.credentials creds auth basic_auth http_auth proxy_auth
    Authorization authorization cookie session_cookie jwt slack_webhook webhook_url sentry_dsn
    api_key_2 API_KEY_PROD user_token my_token team_key logging.wandb.api_key model/api_key
    +trainer.logger.api_key kaggle_key KAGGLE_KEY
    """
)

PLAIN = _names(
    """
    lr learning_rate batch_size seed epochs num_layers dropout weight_decay optimizer scheduler
    key_dim num_keys n_keys key_size key_value_heads key_padding_mask qkv_bias
    num_key_value_heads num_kv_heads query_key_norm qk_norm keys keys_to_ignore label_keys
    feature_keys metric_keys keyboard monkey turkey hockey keypoint keypoints keyframe keyword
    keywords key_frames donkey label_key feature_key image_key text_key sort_key partition_key
    group_key metric_key rng_key prng_key data_key input_key target_key loss_key obs_key
    observation_key state_dict_key cache_key primary_key monitor_key hash_key query_key
    tokenizer tokenizer_name tokenizer_path tokenize max_tokens num_tokens min_tokens n_tokens
    tokens tokens_per_batch total_tokens max_new_tokens max_num_batched_tokens token_dim
    token_embedding token_type_ids token_dropout bos_token eos_token pad_token unk_token
    mask_token cls_token sep_token bos_token_id pad_token_id image_token image_token_id
    additional_special_tokens decoder_start_token_id forced_bos_token_id add_bos_token
    add_eos_token use_cls_token class_token distillation_token register_tokens
    num_register_tokens prompt_tokens start_token end_token stop_token stop_tokens
    loss_per_token time_per_token max_token num_token prefix_token special_token speaker_token
    next_token last_token first_token padToken eosToken padTokenId token_count token_length
    max_token_length tokenizer_class detokenize author authors authority authenticity_loss
    num_authors secretary compass bypass forward_pass n_passes num_passes pass_through
    access_key_id AWS_ACCESS_KEY_ID key_id api_key_file api_key_path token_file password_file
    secret_name key_name credentials_path credentials_file api_key_env cookie_name basic_block
    private_layers session_length account_id client_id shared_embeddings signature hidden_size
    masked_lm_prob heads sharding_strategy string connection conn_type url uri endpoint username
    user host port project entity objective eval_metric tree_method max_depth eta
    monotone_constraints
    """
)


@pytest.mark.parametrize("name", SECRET)
def test_the_name_of_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", [*PLAIN, "", "2", "_", "---"])
def test_the_name_of_something_else(name: str) -> None:
    assert not is_secret(name)


def _options() -> list[str]:
    kinds: list[Any] = [
        ScalingConfig,
        RunConfig,
        DataConfig,
        ValidationConfig,
        ValidationTaskConfig,
    ]
    kinds += [getattr(trackers, name) for name in trackers.NAMES.values()]
    kinds += map(load_backend, backend_names())
    return [each.name for kind in kinds if is_dataclass(kind) for each in fields(kind)]


def test_no_option_of_a_run_is_taken_for_a_secret() -> None:
    assert not [name for name in _options() if is_secret(name)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'https://me:K@host/x.csv' has no rows.", "'https://…@host/x.csv' has no rows."),
        ("of s3://me:K@a/b and ftp://me:K@c, twice", "of s3://…@a/b and ftp://…@c, twice"),
        ("(abfs://c@a/x?sv=1&sig=K): gone", "(abfs://c@a/x?sv=1&sig=… gone"),
        ("tcp://10.0.0.1:29500 and me@host: refused", "tcp://10.0.0.1:29500 and me@host: refused"),
    ],
)
def test_an_address_in_a_text_is_shown_without_its_password(text: str, shown: str) -> None:
    assert without_credentials_in(text) == shown
    assert without_credentials_in(shown) == shown
