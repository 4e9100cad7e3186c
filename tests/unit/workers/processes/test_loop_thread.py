"""A thread with an event loop ends when it is closed, or is left behind with a word."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from polytrain.workers.processes.loop_thread import LoopThread, in_daemon_thread


def is_there(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_what_still_runs_is_cancelled() -> None:
    loop = LoopThread("a loop of this test")
    waiting = loop.submit(asyncio.sleep(600))
    loop.close()
    assert waiting.cancelled()
    assert not is_there("a loop of this test")


def test_a_thread_that_is_stuck_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """It may be in a call of the system that doesn't return."""
    loop = LoopThread("a stuck loop")
    stuck, may_go_on = threading.Event(), threading.Event()

    def wait_for_ever() -> None:
        stuck.set()
        may_go_on.wait()

    loop.call(wait_for_ever)
    stuck.wait()
    loop.close(timeout_s=0.05)
    assert "thread a stuck loop hasn't ended within 0.05 s" in caplog.text
    assert "in wait_for_ever" in caplog.text
    may_go_on.set()


def test_a_thread_ends_though_whoever_closes_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another Ctrl-C."""
    loop = LoopThread("an interrupted loop")
    [thread] = [each for each in threading.enumerate() if each.name == "an interrupted loop"]
    join = thread.join

    def interrupted(*_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "join", interrupted)
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.close()
    join(30)
    assert not thread.is_alive()


def test_a_call_beside_the_loop_returns_or_raises_there() -> None:
    async def both() -> None:
        assert await in_daemon_thread(max, 1, 2) == 2
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(divmod, 1, 0)

    asyncio.run(both())
