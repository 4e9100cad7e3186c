"""What a signal does depends on what the run is doing."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Literal

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


def test_prints_fail_only_until_it_is_known_that_the_terminal_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, descriptor = pty.openpty()
    with open(descriptor, "w") as stream:
        monkeypatch.setattr(sys, "__stdout__", stream)
        Interrupts().handle(HUP)
        print("seen", file=stream, flush=True)
        assert os.read(terminal, 100) == b"seen\r\n"
        os.close(terminal)
        with pytest.raises(OSError, match="Input/output error"):
            print("lost", file=stream, flush=True)
        Interrupts().handle(HUP)
        print("lost", file=stream, flush=True)


ENDS = {INT: KeyboardInterrupt(), TERM: SystemExit(143), HUP: SystemExit(129)}


@pytest.fixture
def _default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDS}
    signal.signal(INT, signal.default_int_handler)
    for number in (TERM, HUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_default_handlers")
@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize("phase", ["deferred", "allowed", "ending"])
def test_a_signal_ends_the_program_when_all_is_released(
    number: signal.Signals, phase: Literal["deferred", "allowed", "ending"]
) -> None:
    seen: list[str] = []
    handler = signal.getsignal(number)

    def run() -> None:
        with stop_requests(lambda name: True, explain=seen.append) as interrupts:
            interrupts.phase = phase
            signal.raise_signal(number)
            seen.append("released")

    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        run()
    assert repr(raised.value) == repr(ENDS[number])
    assert seen == ["released", number.name]
    assert signal.getsignal(number) is handler


@pytest.mark.usefixtures("_default_handlers")
@pytest.mark.parametrize(("first", "second"), [(INT, TERM), (TERM, INT), (HUP, INT)])
def test_the_first_signal_decides_how_the_program_ends(
    first: signal.Signals, second: signal.Signals
) -> None:
    def run() -> None:
        with stop_requests(lambda name: True) as interrupts, interrupts.allowed():
            signal.raise_signal(first)
            signal.raise_signal(second)
            raise AssertionError("the second interrupts what waits")

    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        run()
    assert repr(raised.value) == repr(ENDS[first])


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.usefixtures("_default_handlers")
def test_a_program_that_catches_errors_of_the_run_ends_too(number: signal.Signals) -> None:
    def run() -> None:
        with stop_requests(lambda name: True):
            signal.raise_signal(number)
            raise OSError("the disk is full")

    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        run()
    assert str(raised.value.__cause__) == "the disk is full"


def test_an_interrupt_of_the_users_own_stays_as_it_is() -> None:
    own = KeyboardInterrupt("raised by the training function")

    def run() -> None:
        with stop_requests(lambda name: True):
            raise own

    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    assert raised.value is own


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_handler_of_the_program_stays(handler: Callable[..., None]) -> None:
    before = signal.signal(HUP, handler)
    try:
        with stop_requests(lambda name: True):
            assert signal.getsignal(HUP) is handler
    finally:
        signal.signal(HUP, before)
