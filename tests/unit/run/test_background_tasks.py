"""Slow things are done one after another while the controller goes on listening."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from polytrain.errors import FailureKind
from polytrain.events.attempt import AgentLost, Event, Failed
from polytrain.events.driver import TaskEnded
from polytrain.run.background_tasks import BackgroundTask, BackgroundTasks
from polytrain.workers.driver.group import Mailbox

SECONDS = 30
"""After which a thread that should have come isn't waited for any more."""


def lost(number: int) -> AgentLost:
    return AgentLost(rank=number, reason="")


def task(
    number: int, done: list[int], *, first: Callable[[], object] = lambda: None
) -> BackgroundTask:
    """Something that is noted when it is done, and results in an event."""

    def do() -> Event:
        first()
        done.append(number)
        return lost(number)

    return do


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Keeps a chore waiting until it is set; set in the end, whatever happens."""
    event = threading.Event()
    yield event
    event.set()


def held_by(gate: threading.Event) -> Callable[[], object]:
    return lambda: gate.wait(SECONDS)


@pytest.mark.parametrize("at_once", [True, False])
def test_chores_are_done_in_the_order_in_which_they_were_given(at_once: bool) -> None:
    done: list[int] = []
    with BackgroundTasks(mailbox=Mailbox(), at_once=at_once) as background_tasks:
        for number in range(50):
            background_tasks.submit(task(number, done))
        background_tasks.finish()
        assert done == list(range(50))
        assert list(background_tasks.results()) == [lost(number) for number in range(50)]
        assert list(background_tasks.results()) == [], "each result is told once"


def test_inline_a_chore_is_done_before_the_caller_goes_on() -> None:
    threads: list[threading.Thread] = []
    with BackgroundTasks(mailbox=Mailbox(), at_once=True) as background_tasks:
        background_tasks.submit(lambda: threads.append(threading.current_thread()))
        assert threads == [threading.current_thread()]


def test_the_caller_goes_on_while_a_chore_is_done(gate: threading.Event) -> None:
    done: list[int] = []
    with BackgroundTasks(mailbox=Mailbox(), at_once=False) as background_tasks:
        background_tasks.submit(task(1, done, first=held_by(gate)))
        background_tasks.submit(task(2, done))
        assert done == []
        assert list(background_tasks.results()) == []
        gate.set()
        background_tasks.finish()
        assert done == [1, 2]


def test_the_mailbox_gets_an_event_for_each_result() -> None:
    mailbox = Mailbox()
    with BackgroundTasks(mailbox=mailbox, at_once=False) as background_tasks:
        background_tasks.submit(lambda: None)
        for number in (1, 2):
            background_tasks.submit(task(number, []))
        heard: list[Event] = []
        for _ in range(2):
            assert mailbox.get(timeout=SECONDS) == (TaskEnded(),)
            heard += background_tasks.results()
        background_tasks.finish()
    assert heard == [lost(1), lost(2)]
    assert mailbox.empty(), "what has no result puts nothing into it"


def test_finishing_where_nothing_was_given_is_fine() -> None:
    with BackgroundTasks(mailbox=Mailbox(), at_once=False) as background_tasks:
        background_tasks.finish()


def test_a_restart_waits_only_for_what_an_attempt_needs(gate: threading.Event) -> None:
    """Not for the deletion of what its checkpoint has replaced."""
    done: list[int] = []
    with BackgroundTasks(mailbox=Mailbox(), at_once=False) as background_tasks:
        background_tasks.submit(task(1, done), attempt=7)
        background_tasks.submit(task(2, done, first=held_by(gate)))
        background_tasks.finish_needed()
        assert list(background_tasks.results()) == [lost(1)]
        assert not background_tasks.have_news
        gate.set()
        background_tasks.finish()
        assert done == [1, 2]


def test_what_was_given_is_done_before_all_is_over(gate: threading.Event) -> None:
    done: list[int] = []
    with BackgroundTasks(mailbox=Mailbox(), at_once=False) as background_tasks:
        background_tasks.submit(task(1, done, first=held_by(gate)))
        background_tasks.submit(task(2, done))
        gate.set()
    assert done == [1, 2]


def test_an_interrupted_run_finishes_only_what_is_being_done() -> None:
    """A commit that has begun must not go on behind the back of the next driver."""
    done: list[int] = []
    begun = threading.Event()

    def interrupted() -> None:
        with BackgroundTasks(mailbox=Mailbox(), at_once=False) as background_tasks:

            def until_no_more_is_taken() -> None:
                begun.set()
                with contextlib.suppress(RuntimeError):
                    while True:
                        background_tasks.submit(lambda: None)

            background_tasks.submit(task(1, done, first=until_no_more_is_taken))
            background_tasks.submit(task(2, done))
            assert begun.wait(SECONDS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [1]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_nobody_has_expected_is_a_failure_of_the_storage(at_once: bool) -> None:
    """A rank may be waiting for that commit: it would wait for ever."""
    mailbox = Mailbox()

    def stumble() -> None:
        raise TypeError("an fsspec client's own error")

    with BackgroundTasks(mailbox=mailbox, at_once=at_once) as background_tasks:
        background_tasks.submit(stumble, attempt=7)
        assert mailbox.get(timeout=SECONDS) == (TaskEnded(),)
        [failed] = background_tasks.results()
        done: list[int] = []
        background_tasks.submit(task(1, done), attempt=7)
        background_tasks.finish()
        assert done == [1]
    assert isinstance(failed, Failed)
    assert (failed.attempt, failed.failure.kind) == (7, FailureKind.STORAGE)
    assert failed.failure.message == "TypeError: an fsspec client's own error"
    assert "in stumble" in failed.failure.traceback


def test_an_interrupt_is_no_failure() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        BackgroundTasks(mailbox=Mailbox(), at_once=True) as background_tasks,
    ):
        background_tasks.submit(interrupted)


def test_what_no_attempt_needs_fails_none(caplog: pytest.LogCaptureFixture) -> None:
    """Such as the deletion of an old checkpoint."""

    def stumble() -> None:
        raise TypeError("an fsspec client's own error")

    with BackgroundTasks(mailbox=Mailbox(), at_once=True) as background_tasks:
        background_tasks.submit(stumble)
        assert list(background_tasks.results()) == []
    assert "an fsspec client's own error" in caplog.text
    assert "in stumble" in caplog.text


def test_results_that_come_while_others_are_taken_wait_for_the_next_time() -> None:
    """A rank that makes checkpoints without a pause keeps nobody from asking for a stop."""
    done: list[int] = []
    with BackgroundTasks(mailbox=Mailbox(), at_once=True) as tasks:
        tasks.submit(task(0, done))
        for _ in tasks.results():
            tasks.submit(task(len(done), done))
        assert done == [0, 1]
        assert list(tasks.results()) == [lost(1)]
