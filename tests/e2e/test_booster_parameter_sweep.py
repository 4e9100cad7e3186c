"""Each parameter of XGBoost and LightGBM: several workers, and a restart, train one model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lightgbm.basic import _ConfigAliases
from tests.e2e.boosters import fit, model_of
from tests.sweeps import only_in_sweep

from polytrain import RunConfig
from polytrain_lightgbm import known_parameters as of_lightgbm
from polytrain_lightgbm.parameters import _OURS as LIGHTGBM_OF_THE_RUN
from polytrain_xgboost.known_parameters import KNOWN_PARAMETERS as OF_XGBOOST
from polytrain_xgboost.parameters import _OURS as XGBOOST_OF_THE_RUN
from polytrain_xgboost.parameters import own_name

Case = tuple[str, dict[str, Any]]
"""Which labels, and the parameters."""

FOREST = {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.6}

XGBOOST: list[Case] = [
    ("class", {"max_bin": 16}),
    ("class", {"eta": 0.1}),
    ("class", {"gamma": 1.0}),
    ("class", {"grow_policy": "lossguide", "max_leaves": 5, "max_depth": 0}),
    ("class", {"min_child_weight": 5}),
    ("class", {"max_delta_step": 1}),
    ("class", {"lambda": 30}),
    ("class", {"alpha": 5}),
    ("class", {"tree_method": "hist"}),
    ("class", {"scale_pos_weight": 3}),
    ("class", {"refresh_leaf": 1}),
    ("class", {"num_parallel_tree": 3, "subsample": 0.5}),
    ("class", {"monotone_constraints": "(1,0,-1,0)"}),
    ("class", {"interaction_constraints": [["x0", "x1"]]}),
    ("class", {"max_cat_to_onehot": 4}),
    ("class", {"max_cat_threshold": 2, "max_cat_to_onehot": 2}),
    ("class", {"base_score": 0.3}),
    ("class", {"eval_metric": ["auc", "error@0.3"]}),
    ("class", {"disable_default_eval_metric": True}),
    ("class", {"updater": "grow_quantile_histmaker"}),
    ("class", {"max_cached_hist_node": 1000}),
    ("class", {"subsample": 0.5, "sampling_method": "uniform"}),
    ("class", {"subsample": 0.5, "seed": 3}),
    ("class", {"colsample_bytree": 0.5}),
    ("class", {"colsample_bylevel": 0.5}),
    ("class", {"colsample_bynode": 0.5}),
    ("class", {"nthread": 1, "verbosity": 0, "validate_parameters": True}),
    ("class", {"booster": "dart", "rate_drop": 0.5, "one_drop": 1, "skip_drop": 0.2}),
    ("class", {"booster": "dart", "rate_drop": 0.5, "sample_type": "weighted"}),
    ("class", {"booster": "dart", "rate_drop": 0.5, "normalize_type": "forest"}),
    ("any", {"objective": "reg:pseudohubererror", "huber_slope": 0.5}),
    ("positive", {"objective": "reg:tweedie", "tweedie_variance_power": 1.3}),
    ("any", {"objective": "reg:quantileerror", "quantile_alpha": 0.3}),
    ("any", {"objective": "reg:quantileerror", "quantile_alpha": [0.2, 0.8], "base_score": 0.4}),
    ("classes", {"objective": "multi:softprob", "num_class": 4}),
    ("classes", {"objective": "multi:softprob", "num_class": 4, "base_score": 0.3}),
    (
        "classes, no categories",
        {"objective": "multi:softmax", "num_class": 4, "multi_strategy": "multi_output_tree"},
    ),
    ("queries", {"objective": "rank:ndcg", "ndcg_exp_gain": False}),
    ("queries", {"objective": "rank:ndcg", "lambdarank_num_pair_per_sample": 4}),
    ("queries", {"objective": "rank:ndcg", "lambdarank_normalization": False}),
    ("queries", {"objective": "rank:ndcg", "lambdarank_score_normalization": False}),
    ("queries", {"objective": "rank:pairwise", "lambdarank_pair_method": "mean"}),
    (
        "queries",
        {"objective": "rank:ndcg", "lambdarank_unbiased": True, "lambdarank_bias_norm": 2},
    ),
]
LIGHTGBM: list[Case] = [
    ("any", {"max_bin": 15}),
    ("any", {"max_bin_by_feature": [16, 32, 64, 255, 8]}),
    ("any", {"min_data_in_bin": 10}),
    ("any", {"bin_construct_sample_cnt": 500, "data_random_seed": 3}),
    ("any", {"feature_pre_filter": False}),
    ("any", {"forcedbins_filename": json.dumps([{"feature": 0, "bin_upper_bound": [0.5]}])}),
    ("any", {"max_depth": 3}),
    ("any", {"num_leaves": 7}),
    ("any", {"min_data_in_leaf": 50}),
    ("any", {"min_sum_hessian_in_leaf": 5.0}),
    ("any", {"path_smooth": 1.0}),
    ("any", {"lambda_l1": 5.0}),
    ("any", {"lambda_l2": 30.0}),
    ("any", {"min_gain_to_split": 1.0}),
    ("any", {"max_delta_step": 0.2}),
    ("any", {"learning_rate": 0.3}),
    ("any", {"feature_contri": [1, 0.5, 1, 0.1, 1]}),
    ("any", {"boost_from_average": False}),
    ("any", {"zero_as_missing": True}),
    ("any", {"use_missing": False}),
    ("any", {"enable_bundle": False, "is_enable_sparse": False, "two_round": True}),
    ("any", {"force_row_wise": True}),
    ("any", {"force_col_wise": True, "histogram_pool_size": 10}),
    ("any", {"deterministic": True, "num_threads": 1, "verbosity": -1}),
    ("any", {"saved_feature_importance_type": 1}),
    ("any", {"cegb_penalty_split": 0.01, "cegb_tradeoff": 0.5}),
    ("any", {"cegb_penalty_feature_coupled": [0.1, 0, 0, 0, 0]}),
    ("any", {"cegb_penalty_feature_lazy": [0.1, 0, 0, 0, 0]}),
    ("any", {"reg_sqrt": True}),
    ("any", {"cat_l2": 1.0}),
    ("any", {"cat_smooth": 1.0}),
    ("any", {"max_cat_threshold": 2}),
    ("any", {"max_cat_to_onehot": 8}),
    ("any", {"min_data_per_group": 10}),
    ("any", {"monotone_constraints": [1, 0, -1, 0, 0]}),
    ("any", {"monotone_constraints": [1, 0, -1, 0, 0], "monotone_penalty": 1.0}),
    (
        "any",
        {
            "monotone_constraints": [1, 0, -1, 0, 0],
            "monotone_constraints_method": "advanced",
        },
    ),
    ("any", {"bagging_freq": 2, "bagging_fraction": 0.5, "bagging_seed": 5}),
    ("class", {"bagging_freq": 1, "pos_bagging_fraction": 0.5, "neg_bagging_fraction": 0.8}),
    ("any", {"feature_fraction": 0.6, "feature_fraction_seed": 3}),
    ("any", {"feature_fraction_bynode": 0.6, "seed": 4}),
    ("any", {"extra_trees": True, "extra_seed": 3}),
    ("any", {"boosting": "dart", "drop_rate": 0.5, "skip_drop": 0.2, "drop_seed": 9}),
    ("any", {"boosting": "dart", "drop_rate": 0.5, "max_drop": 2, "uniform_drop": True}),
    ("any", {"boosting": "dart", "drop_rate": 0.5, "xgboost_dart_mode": True}),
    ("any", FOREST),
    (
        "any",
        {
            **{"data_sample_strategy": "goss", "learning_rate": 0.5},
            **{"top_rate": 0.3, "other_rate": 0.2},
        },
    ),
    ("any", {"use_quantized_grad": True, "num_grad_quant_bins": 8, "stochastic_rounding": False}),
    ("any", {"use_quantized_grad": True, "quant_train_renew_leaf": True}),
    ("any", {"objective": "huber", "alpha": 0.5}),
    ("any", {"objective": "quantile", "alpha": 0.3}),
    ("any", {"objective": "fair", "fair_c": 2.0}),
    ("positive", {"objective": "poisson", "poisson_max_delta_step": 0.5}),
    ("positive", {"objective": "tweedie", "tweedie_variance_power": 1.3}),
    ("class", {"objective": "binary", "is_unbalance": True}),
    ("class", {"objective": "binary", "scale_pos_weight": 3, "sigmoid": 0.7}),
    ("class", {"objective": "binary", "metric": ["auc", "binary_error"]}),
    ("classes", {"objective": "multiclass", "num_class": 4, "multi_error_top_k": 2}),
    (
        "classes",
        {
            **{"objective": "multiclassova", "num_class": 4, "metric": "auc_mu"},
            "auc_mu_weights": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 2, 0],
        },
    ),
    ("queries", {"objective": "lambdarank", "lambdarank_truncation_level": 5, "eval_at": [3]}),
    ("queries", {"objective": "lambdarank", "lambdarank_norm": False}),
    ("queries", {"objective": "lambdarank", "label_gain": [0, 1, 5, 50]}),
    (
        "queries",
        {
            **{"objective": "lambdarank", "bagging_by_query": True},
            **{"bagging_freq": 1, "bagging_fraction": 0.5},
        },
    ),
    ("queries", {"objective": "rank_xendcg", "objective_seed": 3}),
]

BY_WORKER = {
    "xgboost": ("lambdarank_pair_method", "lambdarank_unbiased"),
    "lightgbm": (
        *("rf", "goss", "rank_xendcg", "use_quantized_grad", "cegb_penalty_feature_lazy"),
    ),
}
"""Parameters, or values, with which the docs say that another number of workers trains another
model."""

BY_RESTART = {"xgboost": (), "lightgbm": ("goss", "rank_xendcg", "use_quantized_grad")}
"""The same of a restart."""


def cases() -> list[Any]:
    """One in twenty each time, all in the sweep."""
    found = []
    for backend, some in (("xgboost", XGBOOST), ("lightgbm", LIGHTGBM)):
        for number, (labels, params) in enumerate(some):
            values, name = (backend, labels, params), f"{backend}-{labels}-{params}"
            each_time = number % 20 == 10
            case = pytest.param if each_time else only_in_sweep
            found.append(case(*values, id=name))
    return found


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    """By labels: four columns of numbers, some of which are missing, and one of categories."""
    generator = np.random.default_rng(0)
    rows = 1500
    x, kind = generator.normal(size=(rows, 4)), generator.integers(0, 6, rows)
    raw = x[:, 0] + x[:, 1] ** 2 - x[:, 2] * (kind % 3) + generator.normal(size=rows)
    features = {f"x{number}": x[:, number].copy() for number in range(4)}
    features["x3"][::7] = np.nan
    features["x2"][::5] = 0
    grades = np.digitize(raw, [-0.5, 0.5, 1.5])
    labels = {
        "any": raw,
        "positive": raw - raw.min() + 0.1,
        "class": raw > 0.5,
        "classes": grades,
        "queries": grades,
    }
    kinds = np.array(list("abcdef"))[kind]
    tables = {
        name: pa.table({**features, "kind": kinds, "y": label.astype(float)})
        for name, label in labels.items()
    }
    queries = pa.array(np.arange(rows) // 15)
    return {
        **tables,
        "queries": tables["queries"].append_column("q", queries),
        "classes, no categories": tables["classes"].drop_columns(["kind"]),
    }


@pytest.mark.sweep
@pytest.mark.parametrize(("backend", "labels", "params"), cases())
def test_workers_and_restarts_train_one_model(
    quiet: RunConfig,
    tables: dict[str, pa.Table],
    backend: str,
    labels: str,
    params: dict[str, Any],
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"backend": backend, "num_boost_round": 6}
    if labels == "queries":
        options[{"xgboost": "qid", "lightgbm": "group"}[backend]] = "q"
    objective = {"xgboost": "reg:squarederror", "lightgbm": "regression"}[backend]
    options["params"] = {"objective": objective, **params}
    if "forcedbins_filename" in params:
        file = tmp_path / "bins.json"
        file.write_text(params["forcedbins_filename"])
        options["params"]["forcedbins_filename"] = str(file)
    options["datasets"] = {"valid": tables[labels][:300]}
    table = tables[labels]
    here, three = (fit(quiet, table, workers, **options) for workers in (0, 3))
    first = fit(quiet, table, 3, **{**options, "num_boost_round": 3})
    rest = fit(quiet, table, 3, restore_from=first.checkpoint, **options)
    assert is_named(BY_WORKER[backend], params) is (model_of(here) != model_of(three))
    assert is_named(BY_RESTART[backend], params) is (model_of(rest) != model_of(three))
    if not is_named(BY_RESTART[backend], params):
        assert [*first.history, *rest.history] == three.history


def is_named(names: Iterable[str], params: dict[str, Any]) -> bool:
    given = {*params, *map(str, params.values())}
    if params.get("stochastic_rounding") is False:
        # Rounded by chance, quantized gradients are each worker's own.
        given.remove("use_quantized_grad")
    return bool({*names} & given)


NOT_SWEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "xgboost": {
        "of the booster gblinear, which is refused": ("feature_selector", "tolerance", "top_k"),
        "of labels with bounds, which have tests of their own": (
            *("aft_loss_distribution", "aft_loss_distribution_scale"),
        ),
        "of an objective that is refused": ("expectile_alpha",),
        "of GPUs": (
            *("debug_synchronize", "device", "extmem_single_page", "fail_on_invalid_gpu_id"),
            *("gpu_id", "use_rmm"),
        ),
        "the run's own": ("seed_per_iteration",),
        "in a model's configuration only": ("boost_from_average", "num_target"),
        "no part of training from rows": ("process_type",),
        "XGBoost has removed it, or never had more than its name": (
            *("default_direction", "lambdarank_diff_normalization", "max_row_perbatch"),
            *("opt_dense_col", "predictor", "single_precision_histogram", "sketch_eps"),
            "sparse_threshold",
        ),
    },
    "lightgbm": {
        "refused": (
            *("device_type", "forcedsplits_filename", "interaction_constraints", "linear_tree"),
            *("linear_lambda", "tree_learner", "top_k"),
        ),
        "of GPUs": (
            *("gpu_device_id", "gpu_device_id_list", "gpu_platform_id", "gpu_use_dp", "num_gpu"),
        ),
        "of files that LightGBM reads itself": (
            *("convert_model_language", "header", "parser_config_file", "precise_float_parser"),
        ),
        "of predictions": (
            *("num_iteration_predict", "pred_early_stop", "pred_early_stop_freq"),
            *("pred_early_stop_margin", "predict_contrib", "predict_disable_shape_check"),
            *("predict_leaf_index", "predict_raw_score", "start_iteration_predict"),
        ),
        "of its command line or its network": (
            *("is_provide_training_metric", "metric_freq", "refit_decay_rate", "time_out"),
        ),
        "of early stopping, in tests/plugin_lightgbm/test_history.py": (
            *("early_stopping_min_delta", "first_metric_only"),
        ),
        "of positions, for which there is no option": ("lambdarank_position_bias_regularization",),
    },
}
"""Why, and which parameters aren't trained with here."""


def test_every_parameter_of_xgboost_is_in_the_sweep() -> None:
    swept = {name for _, params in XGBOOST for name in params} | {"objective"}
    others = {name for names in NOT_SWEPT["xgboost"].values() for name in names}
    of_the_run = {name for names, *_ in XGBOOST_OF_THE_RUN for name in names}
    known = {own_name(name) for name in OF_XGBOOST}
    assert known - of_the_run == swept | others


def test_every_parameter_of_lightgbm_is_in_the_sweep() -> None:
    swept = {name for _, params in LIGHTGBM for name in params} | {"objective"}
    others = {name for names in NOT_SWEPT["lightgbm"].values() for name in names}
    of_the_run = {name for names, *_ in LIGHTGBM_OF_THE_RUN for name in names}
    _ConfigAliases.get("seed")
    known = {*_ConfigAliases.aliases} - of_the_run - {*of_lightgbm.COMMAND_LINE}
    assert known == swept | others
