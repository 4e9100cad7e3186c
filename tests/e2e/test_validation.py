"""Checkpoints are validated in processes of their own, while real workers train and are killed.

What is decided is in `tests/unit/validation/test_run_validation.py`; these runs show the processes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import start_driver
from tests.e2e.journals import journal
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    ValidationTaskConfig,
    make_trainer,
)
from polytrain.testing.processes import eventually


def step_of(checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(Path(directory, "step").read_text())


def report_step(step: int, validation: Any = True, **metrics: Any) -> None:
    """Report a step, on rank 0 with a checkpoint that holds it."""
    if polytrain.get_context().get_world_rank() != 0:
        polytrain.report({"step": step, **metrics})
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "step").write_text(str(step))
        checkpoint = Checkpoint.from_directory(directory)
        polytrain.report({"step": step, **metrics}, checkpoint=checkpoint, validation=validation)


def fit(
    config: RunConfig,
    function: Callable[..., Any],
    validate: Callable[..., Any],
    *,
    num_workers: int = 2,
    backend: str = "reference",
    loop: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    return make_trainer(
        backend,
        function,
        train_loop_config=loop,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=dataclasses.replace(config, name="run"),
        validation_config=ValidationConfig(fn=validate, **options),
    ).fit()


# One run shows what a validation is; each test below asks for one thing of it.


def train_until_validated(config: Mapping[str, Any]) -> None:
    """Take two steps more while the first checkpoint is still being validated."""
    for step in (1, 2, 3):
        report_step(step)
    Path(config["signals"], f"rank-{polytrain.get_context().get_world_rank()}").touch()


def validate_after_training(checkpoint: Checkpoint, signals: str, scale: int) -> dict[str, Any]:
    # Only a training that continues meanwhile writes these.
    ranks = [Path(signals, f"rank-{rank}") for rank in (0, 1)]
    assert eventually(lambda: all(rank.exists() for rank in ranks))
    print("validates", step_of(checkpoint))
    print("complains", file=sys.stderr)
    return {
        "val/score": scale * -abs(step_of(checkpoint) - 2),
        "process": os.getpid(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "directory": os.getcwd(),
    }


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run on two workers, whose checkpoints were validated while it trained."""
    path, signals = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("signals")
    checkpoints = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val/score")
    return fit(
        RunConfig(storage_path=path, progress=False, checkpoint_config=checkpoints),
        train_until_validated,
        validate_after_training,
        loop={"signals": str(signals)},
        task_config=ValidationTaskConfig(fn_kwargs={"signals": str(signals), "scale": 10}),
    )


def test_training_continues_meanwhile(validated: Result) -> None:
    assert [line["reason"] for line in journal(validated.path, "ValidationEnded")] == ["", "", ""]
    assert [metrics["step"] for metrics in validated.history] == [1, 2, 3]
    assert [metrics["val/score"] for metrics in validated.history] == [-10, 0, -10]


def test_each_has_a_process_of_its_own(validated: Result) -> None:
    processes = {metrics["process"] for metrics in validated.history}
    assert len(processes - {os.getpid()}) == 3
    assert {metrics["threads"] for metrics in validated.history} == {"1"}
    assert {metrics["directory"] for metrics in validated.history} == {os.getcwd()}


def test_its_score_decides_which_checkpoints_are_kept(validated: Result) -> None:
    assert [metrics["step"] for _, metrics in validated.best_checkpoints] == [2, 3]
    best = validated.get_best_checkpoint("val/score", "max")
    assert best is not None
    assert step_of(best) == 2
    assert sorted(path.name[:17] for path in Path(validated.path, "checkpoints").iterdir()) == [
        "checkpoint_000001",
        "checkpoint_000002",
    ]


def test_the_stored_run_has_the_same_metrics(validated: Result) -> None:
    config = CheckpointConfig(checkpoint_score_attribute="val/score")
    stored = Result.from_path(validated.path, checkpoint_config=config)
    assert list(stored.history) == list(validated.history)
    assert stored.best_checkpoints == validated.best_checkpoints
    assert stored.metrics == validated.metrics
    for checkpoint, metrics in validated.best_checkpoints:
        assert polytrain.load(checkpoint.path).metrics == metrics


def test_what_it_prints_is_kept(validated: Result) -> None:
    log = Path(validated.path, "logs", "validation.log").read_text()
    assert [word for word in log.split() if word.isdigit()] == ["1", "2", "3"]
    assert log.count("complains") == 3


# Failures: one run in which each checkpoint's validation fails in its own way.

FAILURES = {
    "raises": r"ValueError: not good enough",
    "is killed": r"its process was killed by SIGKILL before it returned",
    "exits": r"its process exited with code 3 before it returned",
    "takes too long": r"it took more than timeout_s=0\.5 seconds, and was killed",
    "returns nothing": r"TypeError: The validation function must return a dict .* returned None",
    "returns a list": r"TypeError: The validation function must return a dict .* returned a list",
    "returns an array": r"TypeError: The metric 'weights' is of the type ndarray",
    "repeats a metric": r"it returned 'step', which the report of the checkpoint has already",
}


def fail(checkpoint: Checkpoint, how: str = "") -> Any:
    match how:
        case "raises":
            raise ValueError("not good enough")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        case "takes too long":
            signal.pause()
        case "returns a list":
            return [1.0]
        case "returns an array":
            import numpy as np

            return {"weights": np.zeros(3)}
        case "repeats a metric":
            return {"val": 1.0, "step": 7}
        case "":
            return {"val": 1.0}
    return None


def train_to_fail() -> None:
    for step, how in enumerate([*FAILURES, ""], start=1):
        limit = 0.5 if how == "takes too long" else None
        report_step(step, ValidationTaskConfig(fn_kwargs={"how": how}, timeout_s=limit))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, str]:
    """A finished run, and what was logged."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]  # its one method
    logger = logging.getLogger("polytrain")
    logger.addHandler(handler)
    try:
        config = RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False)
        result = fit(config, train_to_fail, fail, num_workers=1)
    finally:
        logger.removeHandler(handler)
    return result, "\n".join(records)


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_logged_and_in_the_journal(failed: tuple[Result, str], how: str) -> None:
    result, log = failed
    step = 1 + list(FAILURES).index(how)
    [line] = [line for line in journal(result.path, "ValidationEnded") if line["step"] == step]
    assert line["status"] == ("timed_out" if how == "takes too long" else "failed")
    assert re.search(FAILURES[how], line["reason"])
    assert re.search(rf"\(step {step}\) failed: (.|\n)*{FAILURES[how]}", log)
    assert "val" not in result.history[step - 1]
    assert dict(result.history[step - 1]) == {"step": step}


def train_two_steps() -> None:
    for step in range(step_of(polytrain.get_checkpoint()) + 1, 3):
        report_step(step)


def test_a_failure_ends_the_run_if_it_is_to_and_is_repaired_by_the_next_fit(
    quiet: RunConfig,
) -> None:
    def fail_once(checkpoint: Checkpoint) -> dict[str, Any]:
        raise LookupError("no such file")

    with pytest.raises(TrainingFailedError, match="no such file") as raised:
        fit(quiet, train_two_steps, fail_once, on_failure="fail")
    [failure] = raised.value.failures
    assert failure.kind is FailureKind.VALIDATION
    assert "in fail_once" in failure.traceback
    assert "in call" not in failure.traceback
    assert isinstance(raised.value.__cause__, LookupError)
    assert raised.value.result is not None
    assert raised.value.result.checkpoint is not None

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"val": step_of(checkpoint)}

    result = fit(quiet, train_two_steps, validate, on_failure="fail")
    assert [(metrics["step"], metrics["val"]) for metrics in result.history] == [(1, 1), (2, 2)]


def test_a_worker_may_be_killed_while_a_checkpoint_is_validated(quiet: RunConfig) -> None:
    """The validation isn't the attempt's: it survives the attempt, and isn't repeated."""
    assert quiet.storage_path is not None
    signals = Path(quiet.storage_path, "signals")
    signals.mkdir()

    def train() -> None:
        context, done = polytrain.get_context(), step_of(polytrain.get_checkpoint())
        if context.get_attempt() == 1:
            Path(signals, "restarted").touch()
        for step in range(done + 1, 3):
            report_step(step)
            if step == 1 and context.get_attempt() == 0:
                assert eventually(Path(signals, "validating").exists)
                if context.get_world_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        with Path(signals, "calls").open("a") as calls:
            calls.write(f"{step_of(checkpoint)}\n")
        Path(signals, "validating").touch()
        assert eventually(Path(signals, "restarted").exists)
        return {"val": step_of(checkpoint)}

    config = dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1))
    result = fit(config, train, validate)
    assert result.restarts == 1
    assert [metrics["val"] for metrics in result.history] == [1, 2]
    assert Path(signals, "calls").read_text().split() == ["1", "2"]


def test_what_a_lost_rank_would_have_reported_is_validated_too(quiet: RunConfig) -> None:
    """Rank 0 is lost between its last step and the report: another rank's checkpoint is that."""

    def train() -> None:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from polytrain_torch import TrainingState, prepare_data_loader, prepare_model

        context = polytrain.get_context()
        data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=1)
        loader = prepare_data_loader(data)
        model = prepare_model(torch.nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = TrainingState(model=model, optimizer=optimizer)
        for epoch in range(state.restore().get("epoch", 0), 3):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            if (epoch, context.get_attempt(), context.get_world_rank()) == (1, 0, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            task = ValidationTaskConfig(fn_kwargs={"epoch": epoch})
            state.report({"epoch": epoch}, validation=task, epoch=epoch + 1)

    def validate(checkpoint: Checkpoint, epoch: int) -> dict[str, Any]:
        return {"val": epoch}

    config = dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1))
    result = fit(config, train, validate, backend="torch")
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert result.restarts == 1
    assert [metrics["val"] for metrics in result.history] == [0, 1, 2]
    assert [metrics["val"] for _, metrics in result.best_checkpoints] == [2, 1, 0]


def test_without_workers_it_has_a_process_all_the_same(quiet: RunConfig) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"val": step_of(checkpoint), "process": os.getpid()}

    result = fit(quiet, train_two_steps, validate, num_workers=0)
    assert [metrics["val"] for metrics in result.history] == [1, 2]
    assert os.getpid() not in {metrics["process"] for metrics in result.history}


def test_without_a_function_the_checkpoints_wait_for_the_next_driver(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert quiet.storage_path is not None
    trained = Path(quiet.storage_path, "trained")

    def train() -> None:
        train_two_steps()
        trained.touch()

    def fail_at_the_end(checkpoint: Checkpoint) -> dict[str, Any]:
        assert eventually(trained.exists)
        raise LookupError("no such file")

    with pytest.raises(TrainingFailedError):
        fit(quiet, train, fail_at_the_end, num_workers=1, on_failure="fail")
    caplog.clear()

    def train_without() -> None:
        for step in range(step_of(polytrain.get_checkpoint()) + 1, 4):
            report_step(step, validation=False)

    result = make_trainer(
        "reference",
        train_without,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, name="run"),
    ).fit()
    assert [metrics["step"] for metrics in result.history] == [1, 2, 3]
    assert "1 checkpoint of this run waits for a validation" in caplog.text


DRIVER = """
from polytrain import Checkpoint, ValidationConfig

def step_of(checkpoint):
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(open(f"{directory}/step").read())

def train():
    rank = polytrain.get_context().get_world_rank()
    for step in range(step_of(polytrain.get_checkpoint()) + 1, 4):
        directory = f"rank-{rank}-step-{step}"
        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/step", "w") as file:
            file.write(str(step))
        checkpoint = Checkpoint.from_directory(directory)
        polytrain.report({"step": step}, checkpoint=checkpoint, validation=True)

def validate(checkpoint):
    step = step_of(checkpoint)
    print(step, os.getpid(), file=open("calls", "a"))
    if step == 2 and not os.path.exists("again"):
        open("validating", "w").close()
        signal.pause()
    return {"val": step}

def fit():
    return make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=%d),
        run_config=RunConfig(storage_path=os.getcwd(), name="run", progress=False),
        validation_config=ValidationConfig(validate),
    ).fit()

try:
    result = fit()
except SystemExit as ended:
    print("EXIT", ended.code)
    open("again", "w").close()
    result = fit()
print("VALIDATED", [metrics.get("val") for metrics in result.history])
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("end", "num_workers"),
    [
        (signal.SIGKILL, 2),
        only_in_sweep(signal.SIGKILL, 0),
        only_in_sweep(signal.SIGTERM, 2),
        (signal.SIGTERM, 0),
    ],
)
def test_a_driver_that_ends_leaves_its_validations_to_the_next(
    tmp_path: Path, end: signal.Signals, num_workers: int
) -> None:
    """The second of three validations is running."""
    driver = start_driver(tmp_path, DRIVER % num_workers)
    validating = tmp_path / "validating"
    assert eventually(lambda: validating.exists() or driver.poll() is not None)
    driver.send_signal(end)
    output, errors = driver.communicate(timeout=120)
    assert validating.exists(), output + errors
    running = int((tmp_path / "calls").read_text().split()[-1])
    # It dies with its driver, whatever that dies of.
    assert eventually(lambda: not Path(f"/proc/{running}").exists())
    if end is signal.SIGTERM:
        assert "EXIT 143" in output, errors
    else:
        (tmp_path / "again").touch()
        output, errors = start_driver(tmp_path, DRIVER % num_workers).communicate(timeout=120)
    assert "VALIDATED [1, 2, 3]" in output, errors
    calls = [int(line.split()[0]) for line in (tmp_path / "calls").read_text().splitlines()]
    # The one that was cut short is repeated; no other is.
    assert calls == [1, 2, 2, 3]
