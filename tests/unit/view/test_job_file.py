"""Jobs as TOML: what they become, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain import DataConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.view.cli.job_file import JobFileError, arguments_of, job_of

JOB = """
backend = "lightgbm"
train_loop_per_worker = "tests.unit.view.test_job_file:train"
label = "y"

[params]
num_leaves = 7
nested = {callback = {import = "pathlib:Path.cwd"}}

[datasets]
train = "rows.parquet"

[dataset_config.train]
shuffle = true

[scaling_config]
num_workers = [2, 8]

[run_config]
name = "higgs"
observers = [{import = "pathlib:Path.cwd"}]

[run_config.failure_config]
max_failures = 3
"""


def train() -> None:
    """A training function to be named."""


def test_keys_are_the_arguments_of_make_trainer() -> None:
    assert arguments_of(job_of(JOB)) == {
        "backend": "lightgbm",
        "train_loop_per_worker": train,
        "label": "y",
        "params": {"num_leaves": 7, "nested": {"callback": Path.cwd}},
        "datasets": {"train": "rows.parquet"},
        "dataset_config": {"train": DataConfig(shuffle=True)},
        "scaling_config": ScalingConfig(num_workers=(2, 8)),
        "run_config": RunConfig(
            name="higgs",
            observers=(Path.cwd,),
            failure_config=FailureConfig(max_failures=3),
        ),
    }


def test_one_data_config_for_all() -> None:
    job = job_of('backend = "torch"', ["dataset_config.shuffle=true"])
    assert arguments_of(job)["dataset_config"] == DataConfig(shuffle=True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a.b=3", 3),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=true", True),
        ("a.b=s3://bucket/rows", "s3://bucket/rows"),
        ('a.b="3"', "3"),
        ("a.b=", ""),
        ("a.b=x=y", "x=y"),
    ],
)
def test_a_setting_is_a_value_of_toml_or_a_string(setting: str, value: object) -> None:
    assert job_of("[a]\nb = 1\nc = 2", [setting]) == {"a": {"b": value, "c": 2}}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("backend = ", [], "it isn't TOML"),
        ("", [], 'the key "backend" is missing'),
        ("a = 1", ["a.api_key=2"], "--set a.api_key: a is a value, not a table"),
        ('backned = "x"', [], "Is 'backned' meant for it?"),
        ("", ["a"], "--set a has no value. Give --set a=VALUE"),
        ("", ["=secret"], "--set has a value without a key. Give --set KEY=VALUE"),
        ('backend = "x"', ["run_config.nme=1"], "has no nme. Did you mean 'name'? There are: "),
        ('backend = "x"', ["dataset_config.train.shufle=1"], "dataset_config.train has no shufle"),
        ('backend = "x"', ["dataset_config.shufle=1"], "dataset_config has no shufle. Did you"),
        ('backend = "x"', ["validation_config.task_config.timeout=1"], "has no timeout. Did you"),
        ('backend = "x"', ["validation_config.on_failure=fail"], "argument: 'fn'"),
        ('backend = "x"', ["train_loop_per_worker=train"], "'train' names no object"),
        ('backend = "x"', ["train_loop_per_worker=a.py:f"], "a file: give its module, a:f"),
        ('backend = "x"', ["train_loop_per_worker=nowhere:f"], "No module named 'nowhere'"),
        (
            'backend = "x"',
            ["train_loop_per_worker=json:lods"],
            "has no lods. Did you mean 'loads'?",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, settings: list[str], message: str) -> None:
    with pytest.raises(JobFileError) as error:
        arguments_of(job_of(text, settings))
    assert message in str(error.value)
