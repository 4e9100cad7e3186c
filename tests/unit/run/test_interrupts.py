"""What a signal does depends on what the run is doing."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from polytrain.run.interrupts import Interrupts, stop_requests

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def recorded(asked: list[str], *, ends_by_itself: bool = True) -> Interrupts:
    def ask(name: str) -> bool:
        asked.append(name)
        return ends_by_itself

    return Interrupts(ask)


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_the_first_signal_asks_the_run_to_stop(number: signal.Signals) -> None:
    asked: list[str] = []
    interrupts = recorded(asked)
    with interrupts.allowed():
        interrupts.handle(number)
    assert asked == [number.name]
    assert not interrupts.are_urgent


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_second_interrupts_what_waits_and_all_others_nothing(number: signal.Signals) -> None:
    asked: list[str] = []
    interrupts = recorded(asked)

    def wait() -> None:
        with interrupts.allowed():
            interrupts.handle(HUP)
            interrupts.handle(HUP)
            interrupts.handle(number)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not interrupts.are_urgent
    with interrupts.allowed():
        for _ in range(5):
            interrupts.handle(number)
    assert asked == ["SIGHUP"]
    assert interrupts.are_urgent


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_a_signal_waits_until_it_may_interrupt(ends_by_itself: bool) -> None:
    asked: list[str] = []
    interrupts = recorded(asked, ends_by_itself=ends_by_itself)

    def work() -> None:
        interrupts.handle(TERM)
        interrupts.handle(TERM)
        assert interrupts.are_urgent
        with interrupts.allowed():
            asked.append("never comes so far")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert asked == ["SIGTERM"]


def test_what_takes_resources_while_others_wait_is_not_cut() -> None:
    asked: list[str] = []
    interrupts = recorded(asked, ends_by_itself=False)

    def take() -> None:
        with interrupts.allowed(), interrupts.deferred():
            interrupts.handle(INT)
            asked.append("taken")

    with pytest.raises(KeyboardInterrupt):
        take()
    assert asked == ["SIGINT", "taken"]


def test_a_signal_that_nobody_has_followed_acts_after_the_end() -> None:
    seen: list[str] = []
    # Python's default, as the test runner sets it.
    assert signal.getsignal(INT) is signal.default_int_handler

    def end() -> None:
        with stop_requests(lambda name: True) as interrupts:
            interrupts.phase = "ending"
            signal.raise_signal(INT)
            seen.append("released")

    with pytest.raises(KeyboardInterrupt):
        end()
    assert seen == ["released"]
    assert signal.getsignal(INT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_handler_of_the_program_stays(handler: Callable[..., None]) -> None:
    before = signal.signal(HUP, handler)
    try:
        with stop_requests(lambda name: True):
            assert signal.getsignal(HUP) is handler
    finally:
        signal.signal(HUP, before)
