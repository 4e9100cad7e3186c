"""When a probe looks at its worker process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polytrain.events.attempt import Stacks
from polytrain.observe.probes import PeriodicProbe

FOUND: Any = Stacks(attempt=0, rank=0, text="")


class RefusedTwice:
    """A probe to which the system refuses something at first."""

    period_s = 0.0

    def __init__(self) -> None:
        self.looks = 0

    def look_at(self, now: float, page: object, pid: int) -> Any:
        self.looks += 1
        if self.looks <= 2:
            raise RuntimeError("can't start new thread")
        return FOUND


def test_an_error_does_not_end_the_watch_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def watched() -> Any:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()
        page: Any = None

        def tell(event: Any) -> None:
            found.set_result(event)
            watch.close()

        watch = PeriodicProbe(RefusedTwice(), page=page, pid=0, tell=tell)
        return await asyncio.wait_for(found, 30)

    assert asyncio.run(watched()) is FOUND
    assert caplog.text.count("RuntimeError: can't start new thread") == 1
