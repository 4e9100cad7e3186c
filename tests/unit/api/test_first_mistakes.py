"""What a newcomer types first, and what is wrong with it: a sentence with the thing to write."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import polytrain
from polytrain import (
    Checkpoint,
    DataConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    get_dataset_shard,
    make_trainer,
)
from polytrain.api.run_handle import RunHandle
from polytrain.api.shown import Resumption
from polytrain.backends.reference import Reference
from polytrain.run.requests import StopRequests
from polytrain.text.metrics import plain_metrics
from polytrain.workers.session.checkpoint_files import expect_checkpoint

FRAME = pd.DataFrame({"x": [1.0, 2.0], "y": [1.0, 0.0]})


def train(config: Any) -> None: ...


def make(backend: Any = "reference", function: Any = train, **arguments: Any) -> Trainer:
    return make_trainer(backend, function, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": polytrain}, "backend: a module is not the name of a backend. Pass one, such"),
        ({"function": [FRAME] * 9}, "train_loop_per_worker: a list is not callable. Pass the"),
        (
            {"backend": "torch", "function": "train.py"},
            "'train.py' is not callable. Pass the function itself, or script=…",
        ),
        ({"num_workers": 4}, "no such option. Pass scaling_config=ScalingConfig(num_workers=…)"),
        ({"use_gpu": True}, "no such option. Pass scaling_config=ScalingConfig(use_gpu=…)"),
        ({"name": "first"}, "no such option. Pass run_config=RunConfig(name=…)"),
        (
            {"max_failures": 3},
            "Pass run_config=RunConfig(failure_config=FailureConfig(max_failures=…))",
        ),
        ({"num_to_keep": 3}, "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=…))"),
        ({"shuffle": True}, "no such option. Pass dataset_config=DataConfig(shuffle=…)"),
        ({"config": {"lr": 1}}, "no such option. Pass train_loop_config=…"),
        ({"data": FRAME}, "no such option. Pass datasets=…"),
        ({"epochs": 3}, "For the training function, pass train_loop_config={'epochs': …}. It has"),
        (
            {"backend": "torch", "params": {"lr": 1}},
            "no such option. For the training function, pass train_loop_config={'params': …}",
        ),
        (
            {"backend": "torch", "proces_group": "gloo"},
            "no such option. Did you mean 'process_group'?",
        ),
        ({"resume_from_checkpoint": "/c"}, "no such option. Pass restore_from=…"),
        ({"scaling_config": {"num_workers": 4}}, "Pass a ScalingConfig: ScalingConfig(num_worke"),
        (
            {"run_config": RunConfig(storage_path="s4://bucket/runs")},
            "'s4://bucket/runs': the scheme s4:// is unknown. Did you mean s3:// or gs://? Use a "
            "path, s3://, gs://, abfs://, hdfs:// or an address that fsspec knows",
        ),
        (
            {"datasets": {"train": FRAME}, "dataset_config": {"shuffle": True}},
            "dataset_config: it is a dict of options, not DataConfigs by the data sets' names. "
            "Pass DataConfig(shuffle=…)",
        ),
        (
            {"run_config": RunConfig(stop={"loss": -(10**5000)})},
            "RunConfig.stop['loss']: a whole number of more than 80 digits is not a limit. Give a",
        ),
        ({"datasets": {"train": None}}, "datasets['train']: None is not a data set. Pass a path"),
        (
            {"restore_from": Result(path="/runs/run", checkpoint=Checkpoint("/runs/run/c"))},
            "restore_from: it is a Result. Pass its checkpoint",
        ),
    ],
)
def test_a_trainers_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJobError) as raised:
        make(**arguments)
    [problem] = raised.value.problems
    assert message in str(problem)


def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result(path="/runs/run", checkpoint=Checkpoint("/runs/run/c"), backend=Reference())
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    for call in (lambda: make(run_config=RunConfig(storage_path=".")), lambda: result.predict("x")):
        with pytest.raises(InvalidJobError, match="the working directory was deleted"):
            call()


def test_a_machine_without_a_directory_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a container whose file system is read-only."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(InvalidJobError) as raised:
        make()
    [problem] = raised.value.problems
    assert str(problem) == (
        "TMPDIR: No usable temporary directory found in ['/tmp']. Set it to a directory in which "
        "this user may create files"
    )


def test_a_column_instead_of_its_name_is_named_by_its_type() -> None:
    with pytest.raises(InvalidJobError, match="a Series is not the name of a metric"):
        make(
            run_config=RunConfig(
                checkpoint_config=polytrain.CheckpointConfig(
                    checkpoint_score_attribute=pd.Series(np.zeros(100))  # type: ignore[arg-type]  # wrong on purpose
                )
            )
        )


def test_configurations_by_name_are_no_dict_of_options() -> None:
    Trainer(
        Reference(),
        train,
        datasets={"shuffle": FRAME},
        dataset_config={"shuffle": DataConfig(shuffle=True)},
    )


def handle() -> RunHandle:
    return RunHandle(
        lambda _: Result(path="/runs/run"),
        name="run",
        requests=StopRequests(),
        resumption=Resumption(address="/runs/run", new_name=None, starts_over=False),
    )


RESULT = Result(path="/runs/run", metrics={"loss": 1.0})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Result.from_path(None), TypeError, "None is not a path. Give a path or an addre"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: polytrain.load(RESULT), TypeError, "a Result is not a path"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: RESULT.report(None), TypeError, "None is not a path"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: RESULT.model, AttributeError, "'Result' object has no attribute 'model'"),
        (lambda: Checkpoint.from_directory(None), TypeError, "None is not a path"),  # type: ignore[arg-type]  # wrong on purpose
        (
            lambda: Checkpoint("/tmp").set_metadata([1]),  # type: ignore[arg-type]  # wrong on purpose
            TypeError,
            "The metadata of a checkpoint are a dict, not a list.",
        ),
        (
            lambda: plain_metrics(0.5),  # type: ignore[arg-type]  # wrong on purpose
            TypeError,
            'report takes a dict of metrics, not a float. Pass it by name: report({"loss": …}).',
        ),
        (
            lambda: expect_checkpoint("/tmp"),
            TypeError,
            "report takes a polytrain.Checkpoint, not a str. Pass polytrain.Checkpoint.from_dir",
        ),
        (
            lambda: handle().result("5"),  # type: ignore[arg-type]  # wrong on purpose
            TypeError,
            "timeout has to be a number of seconds or None, not '5'",
        ),
    ],
)
def test_a_call(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("module", ["polytrain", "polytrain.torch", "polytrain.trackers"])
def test_python_can_suggest_a_name_for_a_misspelt_one(module: str) -> None:
    door = import_module(module)
    with pytest.raises(AttributeError) as error:
        _ = door.misspelt
    assert (error.value.name, error.value.obj) == ("misspelt", door)


def test_a_run_that_has_not_ended_in_time_is_named() -> None:
    ended = threading.Event()

    def waits(_: object) -> Result:
        ended.wait()
        return RESULT

    running = RunHandle(
        waits,
        name="first",
        requests=StopRequests(),
        resumption=Resumption(address="/runs/run", new_name=None, starts_over=False),
    )
    try:
        with pytest.raises(TimeoutError, match=r"The run first hasn't ended within 0\.01 s"):
            running.result(0.01)
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("datasets", "remedy"),
    [
        ({}, "The trainer has none: pass it datasets={'valid': …}."),
        ({"train": FRAME}, "There are: 'train'."),
    ],
)
def test_a_data_set_that_was_not_passed_is_named_with_those_that_were(
    datasets: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    trainer = make(
        function=lambda config: get_dataset_shard("valid"),
        datasets=datasets,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    )
    with pytest.raises(TrainingFailedError, match=re.escape(f"named 'valid'. {remedy}")):
        trainer.fit()
