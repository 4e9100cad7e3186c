"""Checkpoints are validated in tasks of Ray, with resources of their own."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.journals import journal

import polytrain
from polytrain import (
    Checkpoint,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
    make_trainer,
)

pytestmark = pytest.mark.on_ray

FAILURES = {
    "raises": "ValueError: not good enough",
    "is killed": "its process was lost: ",
    "takes too long": r"it took more than timeout_s=1 seconds, and was cancelled",
    "returns nothing": "TypeError: The validation function must return a dict",
}


def validate(checkpoint: Checkpoint, how: str = "") -> Any:
    match how:
        case "raises":
            raise ValueError("not good enough")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "takes too long":
            signal.pause()
        case "":
            import ray

            with checkpoint.as_directory() as directory:
                step = int(Path(directory, "step").read_text())
            resources = ray.get_runtime_context().get_assigned_resources()
            return {"val": step, "cpus": resources["CPU"], "process": os.getpid()}
    return None


def train(config: dict[str, Any]) -> None:
    for step, how in enumerate(config["how"], start=1):
        if polytrain.get_context().get_world_rank() != 0:
            polytrain.report({})
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            limit = 1 if how == "takes too long" else None
            polytrain.report(
                {"step": step},
                checkpoint=Checkpoint.from_directory(directory),
                validation=ValidationTaskConfig(fn_kwargs={"how": how}, timeout_s=limit),
            )


def trainer(config: RunConfig, how: list[str], num_workers: int, **options: Any) -> Any:
    return make_trainer(
        "reference",
        train,
        train_loop_config={"how": how},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=config,
        validation_config=ValidationConfig(fn=validate, ray_remote_kwargs=options),
    )


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run in which each validation fails in its own way, and the last one doesn't."""
    config = RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False)
    result: Result = trainer(config, [*FAILURES, ""], 1, num_cpus=2, max_retries=0).fit()
    return result


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_named(failed: Result, how: str) -> None:
    step = 1 + list(FAILURES).index(how)
    [line] = [line for line in journal(failed.path, "ValidationEnded") if line["step"] == step]
    assert line["status"] == ("timed_out" if how == "takes too long" else "failed")
    assert re.match(FAILURES[how], line["reason"])
    if how == "raises":
        assert "in validate" in line["traceback"]


def test_a_validation_has_resources_of_its_own(failed: Result) -> None:
    assert failed.metrics["cpus"] == 2
    assert failed.metrics["val"] == failed.metrics["step"] == 1 + len(FAILURES)
    assert failed.metrics["process"] != os.getpid()


def test_workers_that_fill_the_cluster_are_released_first(quiet: RunConfig) -> None:
    """Otherwise the run would wait for validations, and these for its workers' resources."""
    result = trainer(dataclasses.replace(quiet, name="full"), ["", ""], 4).fit()
    assert [metrics["val"] for metrics in result.history] == [1, 2]


def test_the_function_may_name_a_data_set_in_the_memory_of_ray(quiet: RunConfig) -> None:
    import ray.data

    rows = ray.data.from_items([{"x": 1.0}, {"x": 2.0}])

    def summed(checkpoint: Checkpoint, how: str) -> dict[str, float]:
        return {"total": sum(row["x"] for row in rows.iter_rows())}

    result = make_trainer(
        "reference",
        train,
        train_loop_config={"how": ["", ""]},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=dataclasses.replace(quiet, name="in memory"),
        validation_config=ValidationConfig(summed, ValidationTaskConfig(timeout_s=60)),  # type: ignore[misc]  # as in Ray Train
    ).fit()
    assert [metrics["total"] for metrics in result.history] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_cpu": 1}, "Ray refuses it: .*num_cpu"),
        ({"num_gpus": 8}, "takes 1 CPU and 8 GPU, and no node of the cluster has that"),
        ({"resources": {"tpu": 1}}, "takes 1 CPU and 1 tpu, and no node"),
    ],
)
def test_options_that_ray_can_not_carry_out_are_named(
    quiet: RunConfig, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(InvalidJobError, match=f"ValidationConfig.ray_remote_kwargs: .*{what}"):
        trainer(quiet, [""], 1, **options)
