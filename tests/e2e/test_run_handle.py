"""`fit(wait=False)`: a run in the background, which is watched and stopped by its handle."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

import polytrain
from polytrain import (
    Checkpoint,
    InvalidJobError,
    Result,
    RunConfig,
    RunHandle,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    make_trainer,
)
from polytrain.testing.processes import eventually

WORKERS = pytest.mark.parametrize("workers", [0, 1], ids=["inline", "process"])


def trainer(path: Path, function: Callable[[], None], workers: int = 1) -> Trainer:
    return make_trainer(
        "reference",
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=path, progress=False),
    )


def endless() -> None:
    step = 0
    while True:
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def stuck() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "step").write_text("1")
        polytrain.report({"step": 1}, checkpoint=Checkpoint.from_directory(directory))
    threading.Event().wait()


def three_steps() -> None:
    for step in (1, 2, 3):
        polytrain.report({"loss": 1 / step})


def fails() -> None:
    polytrain.report({"loss": 1.0})
    raise ValueError("the loss is not finite")


def test_ended_runs_whose_handles_nobody_holds_are_not_kept(tmp_path: Path) -> None:
    """A service starts thousands of runs, each with reports, a history and return values."""
    handles = []
    for number in range(3):
        handle = trainer(tmp_path / str(number), three_steps, 0).fit(wait=False)
        handle.result()
        handles.append(weakref.ref(handle))
        del handle
    # The thread of the last one may still be on its way out.
    assert eventually(lambda: gc.collect() >= 0 and not any(handle() for handle in handles))


@WORKERS
def test_the_handle_stops_the_run_with_a_checkpoint(tmp_path: Path, workers: int) -> None:
    handle = trainer(tmp_path, endless, workers).fit(wait=False)
    for report in handle.reports():
        if report.step == 3:
            assert handle.status().state == "training"
            handle.stop("it is good enough")
    result = handle.result()
    for found in (result, Result.from_path(result.path)):
        assert not found.finished
        assert found.stopped is not None
        assert (found.stopped.by, found.stopped.reason) == ("handle", "it is good enough")
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert int(Path(directory, "step").read_text()) == result.metrics["step"]
    status = handle.status()
    assert (status.state, status.step, status.metrics) == (
        "stopped",
        result.metrics["step"],
        result.metrics,
    )
    handle.stop("too late")


def sums_with_torch() -> None:
    import torch

    start, step = polytrain.get_checkpoint(), 0
    if start is not None:
        with start.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    while True:
        step += 1
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            checkpoint = Checkpoint.from_directory(directory)
            polytrain.report({"ranks": total, "step": step}, checkpoint=checkpoint)


def test_ranks_of_torch_stop_together_and_resume(tmp_path: Path) -> None:
    """Rank 0 stops within a collective operation of the others, in a thread of the driver."""
    torch_trainer = make_trainer(
        "torch",
        sums_with_torch,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=tmp_path, progress=False),
    )
    seen = 0
    for _ in range(2):
        handle = torch_trainer.fit(wait=False)
        next(handle.reports())
        handle.stop()
        result = handle.result()
        assert result.metrics == {"ranks": 2.0, "step": len(result.history)}
        assert len(result.history) > seen
        assert result.restarts == (1 if seen else 0)
        seen = len(result.history)


def test_every_iterator_has_all_reports_and_ends_with_the_run(tmp_path: Path) -> None:
    handle = trainer(tmp_path, three_steps).fit(wait=False)
    assert asyncio.run(awaited(handle)).finished
    for _ in range(2):
        assert [each.metrics["loss"] for each in handle.reports()] == [1, 1 / 2, 1 / 3]
    assert handle.status().state == "finished"
    again = trainer(tmp_path, three_steps).fit(wait=False)
    assert again.result().metrics == handle.result().metrics
    assert list(again.reports()) == []


async def awaited(handle: RunHandle) -> Result:
    return await handle


def test_a_wait_has_a_limit_and_can_be_cancelled(tmp_path: Path) -> None:
    handle = trainer(tmp_path, endless).fit(wait=False)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(awaited(handle), timeout=0.01))
    handle.stop()
    stopped = handle.result().stopped
    assert str(stopped) == "stopped by its handle"


def test_the_result_raises_what_fit_would(tmp_path: Path) -> None:
    handle = trainer(tmp_path, fails).fit(wait=False)
    assert [each.metrics for each in handle.reports()] == [{"loss": 1.0}]
    with pytest.raises(TrainingFailedError, match="the loss is not finite") as raised:
        handle.result()
    assert isinstance(raised.value.__cause__, ValueError)
    assert handle.status().state == "failed"


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"(?s)wait: 'no'.*resume: 'maybe'"):
        trainer(tmp_path, three_steps).fit(resume="maybe", wait="no")  # type: ignore[call-overload]
    handle = trainer(tmp_path, three_steps).fit(wait=False)
    with pytest.raises(TypeError, match="reason has to be text, not 3"):
        handle.stop(3)  # type: ignore[arg-type]
    handle.result()


SCRIPT = """
import os, signal, sys, threading
sys.path.insert(0, {tests!r})
from test_run_handle import endless, stuck, three_steps, trainer
from pathlib import Path

def interrupt_the_wait():
    # `result()` handles the signal from its beginning on.
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        pass
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    path = Path({path!r})
    handle = trainer(path, {function}).fit(wait=False)
    {then}
"""


def run_script(path: Path, function: str, then: str) -> str:
    script = path / "script.py"
    tests = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, path=str(path), function=function, then=then))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_a_program_that_ends_waits_for_its_run(tmp_path: Path) -> None:
    run_script(tmp_path, "three_steps", "pass")
    result = Result.from_path(tmp_path / "run")
    assert result.finished
    assert len(result.history) == 3


def test_an_interrupt_outside_of_the_wait_ends_the_program_after_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    then = "next(handle.reports()); os.kill(os.getpid(), signal.SIGINT)"
    tests = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, path=str(tmp_path), function="endless", then=then))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "stopped by SIGINT. To resume it from its newest checkpoint, run" in done.stderr
    result = Result.from_path(tmp_path / "run")
    assert str(result.stopped) == "stopped by a signal: SIGINT"
    assert result.checkpoint is not None


def test_a_second_interrupt_ends_a_run_that_outlives_its_program_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    then = """
    import logging

    class Again(logging.StreamHandler):
        def emit(self, record):
            super().emit(record)
            if "stopped by a signal" in record.getMessage():
                os.kill(os.getpid(), signal.SIGINT)

    logging.getLogger().addHandler(Again())
    next(handle.reports())
    os.kill(os.getpid(), signal.SIGINT)
"""
    tests = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(tests=tests, path=str(tmp_path), function="stuck", then=then))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "what came after its newest checkpoint is repeated" in done.stderr
    assert "run_handle.py" not in done.stderr
    assert not (tmp_path / "run" / "journal.jsonl.drafts-000001").exists()


def test_an_interrupt_during_the_wait_stops_the_run(tmp_path: Path) -> None:
    then = "next(handle.reports()); threading.Thread(target=interrupt_the_wait).start(); "
    then += """
    try:
        handle.result()
    except KeyboardInterrupt:
        print("again:", handle.result().stopped)
"""
    # The signal has ended the first call; who catches that, gets the result.
    assert "again: stopped by a signal: SIGINT" in run_script(tmp_path, "endless", then)
    stopped = Result.from_path(tmp_path / "run").stopped
    assert stopped is not None
    assert stopped.by == "signal"
