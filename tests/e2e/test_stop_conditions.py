"""`RunConfig.stop` and `time_budget_s`: every backend ends where it should, also after a kill.

Which report ends a run is decided in `tests/unit/policy/test_stop_rule.py`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.driver import run_driver
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    make_trainer,
)
from polytrain_plugins import Report

STEPS, ENDS_AT, RESUMED_TO = 9, 4, 6


def dies_and_ends(report: Report) -> bool:
    if (report.attempt, report.step) == (0, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return report.step >= ENDS_AT


def counts(config: dict[str, Any]) -> None:
    """A training function of any backend, with a checkpoint at every step."""
    start, step = polytrain.get_checkpoint(), 0
    if start is not None:
        with start.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    while step < config["steps"]:
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            checkpoint = (
                Checkpoint.from_directory(directory) if step % config["every"] == 0 else None
            )
            polytrain.report({"loss": 1 / step}, checkpoint=checkpoint)


def counts_together(config: dict[str, Any]) -> None:
    """With torch's collective operations, and a part of each checkpoint by every rank."""
    import torch

    start, step = polytrain.get_checkpoint(), 0
    rank = polytrain.get_context().get_world_rank()
    if start is not None:
        with start.as_directory() as directory:
            step = int(Path(directory, f"step-{rank}").read_text())
    while step < config["steps"]:
        step += 1
        total = torch.tensor(step)
        torch.distributed.all_reduce(total)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(int(total) // 2))
            Path(directory, f"step-{rank}").write_text(str(step))
            polytrain.report({"loss": 1 / step}, checkpoint=Checkpoint.from_directory(directory))


def keras_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def fits_keras(config: dict[str, Any]) -> None:
    """As `docs/keras.md` has it."""
    import keras

    import polytrain_tf
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or keras_model()
        if not model.compiled:
            model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    shard = polytrain.get_dataset_shard("train")
    data = shard.to_tf(feature_columns="x", label_columns="y", batch_size=16)
    model.fit(
        data,
        initial_epoch=checkpointed_epoch(),
        epochs=config["steps"],
        shuffle=False,
        verbose=0,
        callbacks=[ReportCallback()],
    )


def columns() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    return {"a": x[:, 0], "b": x[:, 1], "y": x.sum(axis=1)}


def matrix() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    return {"x": x, "y": x.sum(axis=1)}


def step_in(result: Result) -> int:
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        return int(Path(directory, "step").read_text())


FUNCTION = {"train_loop_config": {"steps": STEPS, "every": 1}}
FREQUENT = CheckpointConfig(checkpoint_frequency=1)
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Result], int] | None]] = {
    "reference function": ("reference", {"train_loop_per_worker": counts, **FUNCTION}, step_in),
    "torch function": ("torch", {"train_loop_per_worker": counts_together, **FUNCTION}, step_in),
    "xgboost function": ("xgboost", {"train_loop_per_worker": counts, **FUNCTION}, step_in),
    "lightgbm function": ("lightgbm", {"train_loop_per_worker": counts, **FUNCTION}, step_in),
    "tensorflow function": (
        "tensorflow",
        {"train_loop_per_worker": fits_keras, **FUNCTION, "datasets": {"train": matrix()}},
        None,
    ),
    "reference": (
        "reference",
        {"rounds": STEPS, "label": "y", "datasets": {"train": columns()}},
        None,
    ),
    "xgboost": (
        "xgboost",
        {"num_boost_round": STEPS, "label": "y", "datasets": {"train": columns()}},
        lambda result: int(result.load_model().num_boosted_rounds()),
    ),
    "lightgbm": (
        "lightgbm",
        {"num_boost_round": STEPS, "label": "y", "datasets": {"train": columns()}},
        lambda result: int(result.load_model().num_trees()),
    ),
    "tensorflow": (
        "tensorflow",
        {
            "model": keras_model,
            "compile": {"optimizer": "sgd", "loss": "mse"},
            "epochs": STEPS,
            "label": "y",
            "datasets": {"train": columns()},
        },
        lambda result: int(result.load_model().optimizer.iterations.numpy()) // 2,
    ),
}


def fit(case: str, quiet: RunConfig, stop: Any, **changes: Any) -> Result:
    backend, options, _ = CASES[case]
    parts = "every_rank" if case == "torch function" else None
    is_function = "train_loop_per_worker" in options
    return make_trainer(
        backend,
        **options,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet,
            name="run",
            stop=stop,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(
                written_by=parts, checkpoint_frequency=0 if is_function else 1
            ),
            **changes,
        ),
    ).fit()


# What ends a function is the same for all backends, and Keras trains in one.
IN_SWEEP = ("xgboost function", "lightgbm function", "tensorflow function", "tensorflow")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [only_in_sweep(case, id=case) if case in IN_SWEEP else case for case in CASES]
)
def test_every_backend_ends_at_the_step_also_after_a_kill(case: str, quiet: RunConfig) -> None:
    trained_steps = CASES[case][2] or (lambda result: len(result.history))
    result = fit(case, quiet, dies_and_ends)
    assert result.restarts == 1
    assert result.finished
    assert result.stopped is not None
    found = (result.stopped.by, result.stopped.condition, result.stopped.step)
    assert found == ("condition", "dies_and_ends", ENDS_AT)
    assert (len(result.history), trained_steps(result)) == (ENDS_AT, ENDS_AT)

    journal = Path(result.path, "journal.jsonl")
    before = journal.read_bytes()
    again = fit(case, quiet, {"training_iteration": ENDS_AT})
    assert journal.read_bytes() == before, "nothing is trained if no condition lies further on"
    assert (again.history, again.stopped) == (result.history, result.stopped)

    longer = fit(case, quiet, {"training_iteration": RESUMED_TO, "loss": ">= 1e9"})
    assert longer.history[:ENDS_AT] == result.history
    assert (len(longer.history), trained_steps(longer)) == (RESUMED_TO, RESUMED_TO)
    assert longer.stopped is not None
    assert longer.stopped.condition == f"training_iteration >= {RESUMED_TO}"


def run_reference(
    quiet: RunConfig, *, every: int = 1, steps: int = STEPS, workers: int = 2, **changes: Any
) -> Result:
    return make_trainer(
        "reference",
        counts,
        train_loop_config={"steps": steps, "every": every},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(quiet, name="run", **changes),
    ).fit()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_run_ends_with_the_next_checkpoint(quiet: RunConfig, workers: int) -> None:
    score = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min")
    changes: dict[str, Any] = {"stop": {"loss": 0.3}, "checkpoint_config": score}
    result = run_reference(quiet, every=3, workers=workers, **changes)
    for found in (result, Result.from_path(result.path)):
        assert found.finished
        assert found.error is None
        assert found.stopped is not None
        assert (found.stopped.condition, found.stopped.step) == ("loss <= 0.3", 4)
        assert found.stopped.value == 0.25
        assert (len(found.history), step_in(found)) == (6, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_without_checkpoints_ends_with_the_report(
    quiet: RunConfig, workers: int
) -> None:
    stop = {"training_iteration": 4}
    result = run_reference(quiet, every=100, workers=workers, stop=stop)
    assert (len(result.history), result.finished, result.checkpoint) == (4, True, None)
    assert run_reference(quiet, every=100, workers=workers, stop=stop).history == result.history


def raises_at_2(report: Report) -> bool:
    if report.step == 2:
        raise ArithmeticError("no such limit")
    return False


def test_a_function_that_raises_ends_the_run_with_its_traceback(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match="ArithmeticError: no such limit") as raised:
        run_reference(quiet, stop=raises_at_2)
    assert "in raises_at_2" in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_time_is_counted_over_calls_of_fit(quiet: RunConfig, workers: int) -> None:
    endless = 10**9
    first = run_reference(quiet, steps=endless, workers=workers, time_budget_s=0.5)
    assert first.finished
    assert first.stopped is not None
    assert (first.stopped.by, first.stopped.condition) == ("condition", "time_budget_s=0.5")
    assert step_in(first) == len(first.history)
    assert first.ledger.trained_s() >= 0.5
    again = run_reference(quiet, steps=endless, workers=workers, time_budget_s=0.5)
    assert again.history == first.history
    more = run_reference(quiet, steps=endless, workers=workers, time_budget_s=1.0)
    assert more.ledger.trained_s() >= 1.0
    assert len(more.history) > len(first.history)


def validates(checkpoint: Checkpoint) -> dict[str, float]:
    with checkpoint.as_directory() as directory:
        return {"held_out": 1 / int(Path(directory, "step").read_text())}


def test_validations_are_finished_and_their_metrics_count(quiet: RunConfig) -> None:
    def reports(config: dict[str, Any]) -> None:
        step = 0
        while True:
            step += 1
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                checkpoint = Checkpoint.from_directory(directory)
                polytrain.report({"loss": 0.0}, checkpoint=checkpoint, validation=True)

    def fit_validated(name: str, stop: dict[str, Any]) -> Result:
        return make_trainer(
            "reference",
            reports,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=dataclasses.replace(quiet, name=name, stop=stop),
            validation_config=ValidationConfig(fn=validates),
        ).fit()

    counted = fit_validated("counted", {"training_iteration": 3})
    assert [each["held_out"] for each in counted.history] == [1, 1 / 2, 1 / 3]
    validated = fit_validated("validated", {"held_out": "<= 0.5"})
    assert validated.stopped is not None
    assert (validated.stopped.step, validated.stopped.value) == (2, 0.5)


@pytest.mark.parametrize(
    ("last_step", "condition", "step"), [(100, "loss <= 0.2", 5), (3, "training_iteration >= 3", 3)]
)
def test_the_first_of_several_limits_ends_the_run(
    last_step: int, condition: str, step: int, quiet: RunConfig
) -> None:
    limits = {"loss": 0.2, "training_iteration": last_step}
    stopped = run_reference(quiet, workers=0, stop=limits).stopped
    assert stopped is not None
    assert (stopped.condition, stopped.step) == (condition, step)


def test_a_metric_that_never_comes_is_reported_at_the_end(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run_reference(quiet, workers=0, stop={"los": "<= 0.5"})
    assert "RunConfig.stop['los'] was never met" in caplog.text
    assert "Did you mean 'loss'?" in caplog.text


def test_a_driver_that_dies_before_it_concludes_trains_no_step_more(tmp_path: Path) -> None:
    """The checkpoint that the run ends with is committed; then the driver is killed."""
    script = """
    import pathlib, tempfile
    from polytrain import Checkpoint
    from polytrain.record.entries import RunConcluded
    from polytrain.record.journal import Journal

    def train():
        step = 0
        while True:
            step += 1
            with tempfile.TemporaryDirectory() as directory:
                pathlib.Path(directory, "step").write_text(str(step))
                polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))

    write = Journal.write

    def dies(journal, entry):
        if not isinstance(entry, RunConcluded):
            return write(journal, entry)
        journal.sync()
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if not pathlib.Path("died").exists():
        Journal.write = dies
    result = make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path="runs", name="run", progress=False,
                             stop=lambda report: report.metrics["step"] == 5),
    ).fit()
    print(result.finished, len(result.history), result.restarts, flush=True)
    """
    code, output, errors = run_driver(tmp_path, script)
    assert (code, output) == (-signal.SIGKILL, ""), errors
    code, output, errors = run_driver(tmp_path, script)
    assert output.endswith("True 5 0\n"), errors
