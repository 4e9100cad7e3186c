"""The process that validates a checkpoint: how it starts, what it gets, and how it ends."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.events.output import Output
from polytrain.functions.pickling import dumps
from polytrain.linux.processes import is_readable
from polytrain.testing.processes import eventually
from polytrain.validation import local_validator
from polytrain.validation.local_validator import LocalValidator
from polytrain.validation.validator import NotValidated, Validated, ValidationTask
from polytrain.workers.processes import zygote_connection
from polytrain.workers.processes.zygote_connection import ZygoteSpec, zygote_name

OF_A_ZYGOTE = "polytrain.workers.processes.zygote"


@contextmanager
def validator(
    function: Callable[..., Any],
    directory: Path,
    *,
    modules: tuple[str, ...] = (),
    leave_timeout_s: float = 60.0,
) -> Iterator[tuple[LocalValidator, list[Output]]]:
    """One with a zygote of its own, and what its processes write."""
    zygote = ZygoteSpec(
        name=zygote_name(secrets.token_hex(8), socket.gethostname()),
        environment={},
        modules=modules,
        path=(str(directory), *sys.path),
    )
    written: list[Output] = []
    made = LocalValidator(
        dumps(function),
        zygote,
        environment=dict(os.environ),
        directory=str(directory),
        threads=3,
        leave_timeout_s=leave_timeout_s,
        tell=written.append,
    )
    try:
        yield made, written
    finally:
        made.close()


def task(directory: Path, timeout_s: float | None = None, **fn_kwargs: Any) -> ValidationTask:
    return ValidationTask(
        checkpoint=Checkpoint(str(directory)), fn_kwargs=fn_kwargs, timeout_s=timeout_s
    )


@pytest.mark.parametrize("start", ["forked", "spawned"])
def test_it_is_forked_where_that_is_safe_and_spawned_elsewhere(tmp_path: Path, start: str) -> None:
    """A zygote with a second thread can't fork: the locks of that thread would stay closed."""
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )

    def validate(checkpoint: Checkpoint, scale: int) -> dict[str, Any]:
        import numpy as np

        print("half a line", end="")
        command = Path("/proc/self/cmdline").read_text()
        return {
            "forked": OF_A_ZYGOTE in command,
            "path": checkpoint.path,
            "scaled": np.float32(scale) * 2,
            "threads": os.environ["OMP_NUM_THREADS"],
            "directory": os.getcwd(),
        }

    modules = ("starts_a_thread",) if start == "spawned" else ()
    with validator(validate, tmp_path, modules=modules) as (made, written):
        outcome = made.validate(task(tmp_path, scale=3))
    assert outcome == Validated(
        metrics={
            "forked": start == "forked",
            "path": str(tmp_path),
            "scaled": 6.0,
            "threads": "3",
            "directory": str(tmp_path),
        }
    )
    assert "".join(output.text for output in written) == "half a line"


def test_what_it_raises_is_returned_with_its_traceback(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        raise LookupError("no such file")

    with validator(validate, tmp_path) as (made, _):
        outcome = made.validate(task(tmp_path))
    assert isinstance(outcome, NotValidated)
    assert outcome.reason == "LookupError: no such file"
    assert "in validate" in outcome.traceback
    assert outcome.error is not None
    assert isinstance(pickle.loads(outcome.error), LookupError)


def test_the_next_one_starts_a_zygote_if_the_last_one_was_killed(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint, kill: bool) -> dict[str, Any]:
        if kill:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return {"zygote": os.getppid()}

    with validator(validate, tmp_path) as (made, _):
        killed = made.validate(task(tmp_path, kill=True))
        assert isinstance(killed, NotValidated)
        assert killed.reason == "its process was killed with its zygote before it returned"
        outcome = made.validate(task(tmp_path, kill=False))
        assert isinstance(outcome, Validated)
        # Now between two validations.
        zygote = outcome.metrics["zygote"]
        ended = os.pidfd_open(zygote)
        os.kill(zygote, signal.SIGKILL)
        assert is_readable(ended, 60)
        os.close(ended)
        assert isinstance(made.validate(task(tmp_path, kill=False)), Validated)


def test_a_process_that_does_not_end_after_it_has_returned_is_killed(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        import atexit

        atexit.register(signal.pause)
        return {"process": os.getpid()}

    with validator(validate, tmp_path, leave_timeout_s=0.1) as (made, _):
        outcome = made.validate(task(tmp_path))
    assert isinstance(outcome, Validated)
    assert not Path("/proc", str(outcome.metrics["process"])).exists()


def test_a_cancelled_one_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        Path(checkpoint.path, "process").write_text(f"{os.getpid()} {child.pid}\n")
        child.wait()
        return {}

    processes, outcomes = tmp_path / "process", []
    with validator(validate, tmp_path) as (made, _):
        waiting = threading.Thread(target=lambda: outcomes.append(made.validate(task(tmp_path))))
        waiting.start()
        assert eventually(lambda: processes.exists() and processes.read_text().endswith("\n"))
        made.cancel()
        waiting.join()
        assert outcomes == [None]
        for process in processes.read_text().split():
            assert not Path("/proc", process).exists()
        # Nor does any later one run to its end.
        assert made.validate(task(tmp_path)) is None


def test_one_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with validator(lambda checkpoint: signal.pause(), tmp_path) as (made, _):
        outcome = made.validate(task(tmp_path, timeout_s=0.2))
    assert isinstance(outcome, NotValidated)
    assert outcome.timed_out
    assert outcome.reason == "it took more than timeout_s=0.2 seconds, and was killed"


def test_one_that_cannot_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is its zygote that does nothing any more."""
    monkeypatch.setattr(local_validator, "_KILL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(zygote_connection, "_ENDED_WITHIN_S", 0.05)

    def validate(checkpoint: Checkpoint) -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        signal.pause()

    with validator(validate, tmp_path) as (made, _):
        outcome = made.validate(task(tmp_path, timeout_s=0.5))
    assert isinstance(outcome, NotValidated)
    assert outcome.timed_out
