"""What a run in the background does when its program ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue

import pytest

from polytrain import Result
from polytrain.api.run_handle import RunHandle
from polytrain.api.shown import Resumption
from polytrain.run.requests import StopRequests
from polytrain_plugins import Stopped


def start(train: Callable[[], Result], requests: StopRequests) -> RunHandle:
    return RunHandle(
        lambda _: train(),
        name="run",
        requests=requests,
        resumption=Resumption(address="/runs/run", new_name=None, starts_over=False),
    )


@pytest.mark.parametrize("at_prompt", [False, True])
def test_an_old_interruption_at_a_prompt_stops_no_run(
    at_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: SimpleQueue[Callable[[], None]] = SimpleQueue()
    monkeypatch.setattr("polytrain.api.run_handle._call_at_exit", at_exit.put)
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    if at_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    requests, may_end = StopRequests(), threading.Event()
    asked: list[Stopped] = []
    requests.notify(asked.append, wake=lambda: None)

    def waits(futures: list[Future[Result]], timeout: float) -> None:
        may_end.set()
        wait(futures, timeout)

    monkeypatch.setattr("polytrain.api.run_handle.wait", waits)

    def train() -> Result:
        assert may_end.wait(30)
        return Result(path="/runs/run")

    start(train, requests)
    at_exit.get()()
    assert asked == ([] if at_prompt else [Stopped(by="signal", reason="SIGINT")])


def test_an_interruption_just_before_a_wait_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait isn't interrupted, and a run whose function is stuck never ends by itself."""
    at_exit: SimpleQueue[Callable[[], None]] = SimpleQueue()
    monkeypatch.setattr("polytrain.api.run_handle._call_at_exit", at_exit.put)
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    requests, may_end, waits = StopRequests(), threading.Event(), 0
    monkeypatch.setattr(requests, "end_at_once", may_end.set)

    def interrupted_late(futures: list[Future[Result]], timeout: float | None = None) -> None:
        nonlocal waits
        waits += 1
        assert timeout is not None or waits > 2, "nobody ends this wait"
        if waits == 2:
            raise KeyboardInterrupt
        if waits > 2:
            wait(futures, timeout)

    monkeypatch.setattr("polytrain.api.run_handle.wait", interrupted_late)

    def train() -> Result:
        assert may_end.wait(30)
        return Result(path="/runs/run")

    handle = start(train, requests)
    at_exit.get()()
    assert handle.status().state == "finished"
