"""What a signal does depends on what the run is doing."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from polytrain.run.interrupts import Interrupts, stop_requests

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def running(asked: list[str]) -> Interrupts:
    interrupts = Interrupts(asked.append)
    interrupts.phase = "running"
    return interrupts


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_the_first_signal_asks_the_run_to_stop(number: signal.Signals) -> None:
    asked: list[str] = []
    running(asked).handle(number)
    assert asked == [number.name]


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_second_interrupts_what_runs_and_all_others_wait(number: signal.Signals) -> None:
    asked: list[str] = []
    interrupts = running(asked)
    interrupts.handle(HUP)
    interrupts.handle(HUP)
    with pytest.raises(KeyboardInterrupt):
        interrupts.handle(number)
    for _ in range(5):
        interrupts.handle(number)
    assert asked == ["SIGHUP"]
    assert interrupts.are_urgent


def test_a_signal_waits_while_resources_are_taken() -> None:
    asked: list[str] = []
    interrupts = running(asked)

    def take() -> None:
        with interrupts.deferred():
            interrupts.handle(INT)
            interrupts.handle(INT)
            asked.append("taken")

    with pytest.raises(KeyboardInterrupt):
        take()
    assert asked == ["SIGINT", "taken"]


def test_a_run_that_starts_takes_the_request_and_is_interrupted_once_it_may_be() -> None:
    asked: list[str] = []
    interrupts = Interrupts(asked.append)
    interrupts.handle(TERM)
    interrupts.handle(TERM)
    assert asked == ["SIGTERM"]
    interrupts.phase = "running"
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_if_waiting()


def test_a_signal_that_nobody_has_followed_acts_after_the_end() -> None:
    seen: list[str] = []
    # Python's default, as the test runner sets it.
    assert signal.getsignal(INT) is signal.default_int_handler

    def end() -> None:
        with stop_requests(seen.append) as interrupts:
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
        with stop_requests(lambda name: None):
            assert signal.getsignal(HUP) is handler
    finally:
        signal.signal(HUP, before)
