"""A run goes on while nobody takes what it has to say, and then ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import Checkpoint, Result, RunConfig, ScalingConfig, UserCallback, make_trainer
from polytrain.output.rank_log import RankLog
from polytrain.testing.processes import eventually
from polytrain_plugins import hookimpl

SCRIPT = """
import os, tempfile, time
from pathlib import Path
import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

def train(config):
    rank = polytrain.get_context().get_world_rank()
    Path(config["here"], f"pid {rank}").write_text(str(os.getpid()))
    step = 0
    while True:
        step += 1
        # More than any terminal or pipe holds.
        print("\\n".join("x" * 99 for _ in range(10_000 if step == 1 else 1)), flush=True)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            kept = polytrain.Checkpoint.from_directory(directory) if rank == 0 else None
            polytrain.report({"step": step}, checkpoint=kept, upload="sync")
        time.sleep(0.02)

if __name__ == "__main__":
    make_trainer(
        "reference", train, train_loop_config={"here": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=2, cluster="local"),
        run_config=RunConfig(
            name="run", storage_path="runs", failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A driver whose output nobody reads."""

    directory: Path
    pid: int

    def count(self, event: str) -> int:
        """How many lines of the run's journal say this."""
        journal = self.directory / "runs" / "run" / "journal.jsonl"
        text = journal.read_text() if journal.exists() else ""
        return text.count(f'"event": "{event}"') + text.count(f'"event":"{event}"')

    def waits_for(self, event: str) -> bool:
        """Whether one more of these lines comes."""
        before = self.count(event)
        return eventually(lambda: self.count(event) > before)

    def has_ended(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True


@pytest.fixture(params=["terminal", only_in_sweep("pipes")])
def unread(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    """A driver on a terminal that is held, or with pipes whose readers have stopped."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    if request.param == "terminal":
        pid, held = pty.fork()
        if pid == 0:
            try:
                os.chdir(tmp_path)
                os.execve(sys.executable, command, {**os.environ, "TERM": "xterm"})
            finally:
                os._exit(127)
        driver = Driver(directory=tmp_path, pid=pid)
        yield driver
        if not driver.has_ended():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(held)
    else:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
            yield Driver(directory=tmp_path, pid=process.pid)
            process.kill()


@pytest.mark.sweep
def test_a_run_whose_output_nobody_reads_goes_on_restarts_and_stops(unread: Driver) -> None:
    assert unread.waits_for("Committed")
    assert unread.waits_for("Committed")
    launched, pid = unread.count("Launched"), unread.directory / "pid 1"
    # Rank 0 alone makes checkpoints: the other may not be as far.
    assert eventually(lambda: pid.exists() and pid.read_text())
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert eventually(lambda: unread.count("Launched") > launched)
    assert unread.waits_for("Committed")
    # After SIGINT, Python itself would wait for a reader of the traceback.
    os.kill(unread.pid, signal.SIGTERM)
    assert eventually(unread.has_ended)
    result = Result.from_path(unread.directory / "runs" / "run")
    assert str(result.stopped) == "stopped by a signal: SIGTERM"
    assert result.checkpoint is not None
    assert result.restarts == 1
    for rank in (0, 1):
        log = (unread.directory / "runs" / "run" / "logs" / f"rank_{rank}.log").read_text()
        assert log.count("x" * 99) > 10_000


def test_what_a_reader_gets_that_begins_to_read_again_is_in_order(tmp_path: Path) -> None:
    """All of it, since a pipe's reader may be late by much."""
    (tmp_path / "script.py").write_text(NUMBERS)
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert eventually((tmp_path / "reported").exists)
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert lines == [f"(rank 0) {number}" for number in range(100_000)] + ["the end"]


NUMBERS = """
import os
from pathlib import Path
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

def train(config):
    for number in range(100_000):
        print(number)
    polytrain.report({})
    Path(config["here"], "reported").touch()

if __name__ == "__main__":
    make_trainer(
        "reference", train, train_loop_config={"here": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=1, cluster="local"),
        run_config=RunConfig(name="run", storage_path="runs", progress=False),
    ).fit()
    print("the end")
"""


def saves() -> None:
    for step in range(1, 11):
        print("a line of step", step)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


class Slow(UserCallback):
    """An observer and callback that takes the first event for as long as it is told to wait."""

    def __init__(self, waits_for: Callable[[], bool]) -> None:
        self._waits_for = waits_for
        self.has_seen: bool | None = None
        self.steps: list[int] = []

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self._take(metrics[0]["step"])

    @hookimpl
    def polytrain_reported(self, report: Any) -> None:
        self._take(report.step)

    def _take(self, step: int) -> None:
        if self.has_seen is None:
            self.has_seen = eventually(self._waits_for)
        self.steps.append(step)


@pytest.mark.parametrize("how", ["observers", "callbacks"])
def test_a_slow_hook_holds_nothing_up_and_gets_all_in_order(tmp_path: Path, how: str) -> None:
    journal = tmp_path / "run" / "journal.jsonl"

    def is_trained() -> bool:
        entries = map(json.loads, journal.read_text().splitlines())
        return sum(entry["event"] == "Committed" for entry in entries) == 10

    slow = Slow(is_trained)
    chosen: dict[str, Any] = {how: [slow]}
    result = make_trainer(
        "reference",
        saves,
        scaling_config=ScalingConfig(num_workers=1, cluster="local"),
        run_config=RunConfig(name="run", storage_path=tmp_path, progress=False, **chosen),
    ).fit()
    assert slow.has_seen
    assert slow.steps == list(range(1, 11))
    assert result.finished


def test_a_log_on_a_disk_that_hangs_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hangs as a disk does, so the call that writes hangs: a pipe in place is refused."""
    answers = threading.Event()
    monkeypatch.setattr(RankLog, "write", lambda self, text, *, retry_s: answers.wait())
    try:
        result = make_trainer(
            "reference",
            saves,
            scaling_config=ScalingConfig(num_workers=1, cluster="local"),
            run_config=RunConfig(
                name="run", storage_path=tmp_path, progress=False, storage_timeout_s=1
            ),
        ).fit()
    finally:
        answers.set()
    assert result.finished
    assert "the logs in" in caplog.text
    assert str(tmp_path / "run" / "logs") in caplog.text
