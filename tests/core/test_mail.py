"""What an agent tells: in order, at once where it matters, and reports together."""

from __future__ import annotations

import asyncio

from tests.core.play import raised, reported

from polytrain.run.events import Done, Event
from polytrain.workers.mail import Mail
from polytrain.workers.output import Output

FOR_EVER = 3600.0
DONE = Done(generation=0, rank=0)


def test_the_first_report_goes_at_once() -> None:
    async def scenario() -> None:
        mail = Mail(FOR_EVER)
        mail.put(reported(0, 1))
        assert await anext(mail.batches()) == [reported(0, 1)]

    asyncio.run(scenario())


def test_anything_else_takes_waiting_reports_along() -> None:
    async def scenario(urgent: Event | Output) -> None:
        mail = Mail(FOR_EVER)
        batches = mail.batches()
        mail.put(reported(0, 1))
        await anext(batches)
        waiting = asyncio.ensure_future(anext(batches))
        mail.put(reported(0, 2))
        mail.put(reported(0, 3))
        mail.put(urgent)
        assert await waiting == [reported(0, 2), reported(0, 3), urgent]

    for urgent in (DONE, raised(0), Output(generation=0, rank=0, stream="stdout", text="hello")):
        asyncio.run(scenario(urgent))


def test_what_was_urgent_once_hurries_no_later_report() -> None:
    async def scenario() -> None:
        mail = Mail(FOR_EVER)
        batches = mail.batches()
        mail.put(DONE)
        assert await anext(batches) == [DONE]
        mail.put(reported(0, 1))
        assert await anext(batches) == [reported(0, 1)]
        waiting = asyncio.ensure_future(anext(batches))
        for step in (2, 3):
            mail.put(reported(0, step))
            await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
        mail.put(DONE)
        assert await waiting == [reported(0, 2), reported(0, 3), DONE]

    asyncio.run(scenario())


def test_reports_need_nothing_else_to_arrive() -> None:
    async def scenario() -> None:
        mail = Mail(0.001)
        batches = mail.batches()
        mail.put(reported(0, 1))
        assert await anext(batches) == [reported(0, 1)]
        mail.put(reported(0, 2))
        assert await anext(batches) == [reported(0, 2)]

    asyncio.run(scenario())
