"""Steps that a backend's engine reports: in order, counted over the whole run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.workers.session.test_session_threads import session_with

from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.workers.processes.channel import SocketChannel
from polytrain.workers.session.session import WorkerSession


def begun(directory: Path, theirs: socket.socket, **start: Any) -> WorkerSession:
    """A session that starts there."""
    return session_with(SocketChannel(theirs), directory, start=StartingPoint(**start))


@pytest.mark.parametrize(
    ("start", "steps", "message"),
    [
        ({}, [0], r"calls report\(step=0\) after 0 steps. Count steps over the whole run, from 1"),
        ({}, [1, 2, 2], r"calls report\(step=2\) after 2 steps"),
        ({}, [2, 1], r"calls report\(step=1\) after 2 steps"),
        ({"step": 5, "own": True}, [1], r"report\(step=1\) after 5 steps.* session.checkpoint"),
    ],
)
def test_a_step_that_was_done_before_is_refused(
    tmp_path: Path, start: dict[str, Any], steps: list[int], message: str
) -> None:
    """An engine that ignores its checkpoint would train the same steps again, unnoticed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = begun(tmp_path, theirs, **start)
        *good, bad = steps
        for step in good:
            session.report(step=step, metrics={})
        with pytest.raises(ValueError, match=message):
            session.report(step=bad, metrics={})


@pytest.mark.parametrize("step", [1.0, "1", None, True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TypeError, match="which is no whole number"):
        begun(tmp_path, theirs).report(step=step, metrics={})


def test_a_new_run_counts_from_1_whatever_it_starts_from(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = begun(tmp_path, theirs, step=5)
        first: Any = np.int64(1)
        session.report(step=first, metrics={})
        session.report(step=3, metrics={})
        received = SocketChannel(ours)
        assert [received.receive()[1] for _ in range(2)] == [1, 3]


class WritesElsewhere(ReferenceEngine):
    def save(self, model: Any, directory: Path) -> None:
        pass


def test_a_checkpoint_without_files_is_not_committed(tmp_path: Path) -> None:
    """Nothing could be resumed from it, and nobody would notice before."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = WritesElsewhere(Reference())
        session = session_with(SocketChannel(theirs), tmp_path, engine=engine)
        with pytest.raises(TypeError, match=r"WritesElsewhere.save has written no file"):
            session.finish(np.zeros(2))


@pytest.mark.parametrize("why_not", [None, 5])
def test_a_reason_that_no_journal_could_hold_is_refused(tmp_path: Path, why_not: Any) -> None:
    """Nobody could read the run again."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TypeError, match=rf"record_exactness\({why_not}\): give text"):
        begun(tmp_path, theirs).record_exactness(why_not)
