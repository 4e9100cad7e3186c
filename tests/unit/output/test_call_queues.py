"""Calls that may take any time are made in order, and nobody who gives them waits."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polytrain.output.call_queues import CallQueue, CallQueues
from polytrain.output.queued_records import queued_records
from polytrain.testing.processes import eventually


@contextmanager
def held(queue: CallQueue) -> Iterator[None]:
    """Hold a queue's thread in a call."""
    begins, ends = threading.Event(), threading.Event()

    def hold() -> None:
        begins.set()
        ends.wait()

    queue.submit(hold, size=0)
    begins.wait()
    try:
        yield
    finally:
        ends.set()


def test_calls_are_made_in_order_and_all_of_them() -> None:
    made: list[int] = []
    with CallQueues() as queues:
        queue = queues.of("target")
        for number in range(10_000):
            queue.submit(lambda number=number: made.append(number))  # type: ignore[misc]
    assert made == list(range(10_000))


def test_what_there_is_no_room_for_is_left_out_and_said_in_its_place() -> None:
    made: list[str] = []
    queue = CallQueue("calls", kept=20, left_out=lambda count: made.append(f"{count} left out"))
    with held(queue):
        for number in range(5):
            queue.submit(lambda number=number: made.append(str(number)), size=8)  # type: ignore[misc]
    assert queue.finish()
    queue.submit(lambda: made.append("later"), size=8)
    assert queue.close()
    assert made == ["0", "1", "3 left out", "later"]


def test_a_call_that_does_not_return_is_not_waited_for() -> None:
    queue = CallQueue("calls", left_out=lambda count: None)
    with held(queue):
        assert not queue.finish(stuck_after_s=600, within_s=0.05)
        # Nor is it waited for again.
        assert not queue.finish(stuck_after_s=600, within_s=600)
    assert eventually(queue.close)


def test_nobody_waits_once_the_program_wants_to_end() -> None:
    queue = CallQueue("calls", left_out=lambda count: None, is_urgent=lambda: True)
    with held(queue):
        assert not queue.close(stuck_after_s=600, within_s=600)


def test_a_call_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    made: list[str] = []

    def breaks() -> None:
        raise SystemExit("as a script does")

    with CallQueues() as queues:
        queues.of("target").submit(breaks)
        queues.of("target").submit(lambda: made.append("next"))
    assert made == ["next"]
    assert "the run continues" in caplog.text


def test_a_function_is_repeated_until_it_ends_although_there_are_calls() -> None:
    ticks = threading.Semaphore(0)
    queue = CallQueue("calls", left_out=lambda count: None)
    queue.repeat(ticks.release, iter([0.0] * 5))  # type: ignore[arg-type]
    for _ in range(5):
        assert ticks.acquire(timeout=30)
    queue.repeat(ticks.release, iter([0.0]))  # type: ignore[arg-type]
    assert ticks.acquire(timeout=30)
    assert queue.close()
    assert not ticks.acquire(blocking=False)


def test_streams_that_lead_to_the_same_place_share_a_queue() -> None:
    with (
        tempfile.TemporaryFile("w") as one,
        os.fdopen(os.dup(one.fileno()), "w") as again,
        tempfile.TemporaryFile("w") as other,
        CallQueues() as queues,
    ):
        assert queues.of(one) is queues.of(again)
        assert queues.of(one) is not queues.of(other)


def test_a_target_that_is_stuck_holds_up_no_other() -> None:
    made: list[str] = []
    with CallQueues() as queues, held(queues.of("stuck")):
        queues.of("other").submit(lambda: made.append("call"))
        assert queues.of("other").finish()
        assert made == ["call"]
        assert queues.unfinished(["stuck", "other"], within_s=0.05) == ["stuck"]


class Held(logging.Handler):
    """A handler whose records go nowhere for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.ends.wait()
        self.messages.append(record.getMessage())


def test_a_log_handler_that_is_stuck_holds_up_nobody() -> None:
    root, ours, handler = logging.getLogger(), logging.getLogger("polytrain.run.fit"), Held()
    root.addHandler(handler)
    try:
        with CallQueues() as queues:
            with queued_records(queues), queued_records(queues):
                ours.warning("one")
                ours.warning("two %s", 2)
                ours.debug("nobody wants it")
            assert handler.messages == []
            handler.ends.set()
        assert handler.messages == ["one", "two 2"]
        ours.warning("at once, after the run")
        assert handler.messages[2:] == ["at once, after the run"]
    finally:
        root.removeHandler(handler)
    assert logging.getLogger("polytrain").propagate
    assert logging.getLogger("polytrain").handlers == []


def test_without_handlers_warnings_reach_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with CallQueues() as queues, queued_records(queues):
        logging.getLogger("polytrain.run.fit").info("nobody wants it")
        logging.getLogger("polytrain.run.fit").warning("an %s", "important thing")
    assert capsys.readouterr().err == "an important thing\n"
