"""The contact to a node: what counts as silence, and what doesn't."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from polytrain.workers.ray import losses
from polytrain.workers.ray.losses import NodeContact

_LISTENS = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(listener.accept())
"""

_CLOSES = _LISTENS.replace("kept.append(listener.accept())", "listener.accept()[0].close()")


@contextlib.contextmanager
def listening(program: str) -> Iterator[tuple[subprocess.Popen[str], NodeContact]]:
    """A process that listens, and the contact to it."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield process, NodeContact(address=("127.0.0.1", port), lost_after_s=2)
        finally:
            process.kill()


async def _is_silent_within(contact: NodeContact, seconds: float) -> bool:
    try:
        await asyncio.wait_for(contact.silence(), seconds)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("program", [_LISTENS, _CLOSES])
def test_a_node_that_is_there_is_not_silent(program: str) -> None:
    with listening(program) as (_, contact):
        assert not asyncio.run(_is_silent_within(contact, 2.6))


def test_a_driver_that_was_stopped_itself_takes_no_node_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile it has asked nobody, and the raylet has ended the connection."""
    now, connected = 0.0, NodeContact._connected
    is_asked_twice = asyncio.Event()

    async def stopped_for_a_minute(contact: NodeContact) -> socket.socket | None:
        nonlocal now
        connection = await connected(contact)
        now += 60
        if now > 120:
            is_asked_twice.set()
        return connection

    monkeypatch.setattr(losses, "time", Mock(monotonic=lambda: now))
    monkeypatch.setattr(NodeContact, "_connected", stopped_for_a_minute)

    async def play(contact: NodeContact) -> None:
        silence = asyncio.create_task(contact.silence())
        asked = asyncio.create_task(is_asked_twice.wait())
        await asyncio.wait({silence, asked}, return_when=asyncio.FIRST_COMPLETED)
        assert asked.done(), "it has taken the node for silent"
        silence.cancel()
        asked.cancel()

    with listening(_CLOSES) as (_, contact):
        asyncio.run(play(contact))


def test_a_driver_that_was_stopped_asks_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    took = iter([0.0, 60.0, *[1.0] * 20])
    answers = iter([Mock()])
    asked = 0

    async def connected(_: NodeContact) -> socket.socket | None:
        nonlocal now, asked
        now += next(took)
        asked += 1
        return next(answers, None)

    monkeypatch.setattr(losses, "time", Mock(monotonic=lambda: now))
    monkeypatch.setattr(NodeContact, "_connected", connected)
    contact = NodeContact(address=("127.0.0.1", 1), lost_after_s=5, _answered_at=0.0)
    asyncio.run(contact.silence())
    # It has answered once, and is asked for five seconds after the stop.
    assert asked == 7


def test_a_node_whose_processes_are_stopped_is_not_silent() -> None:
    with listening(_LISTENS) as (process, contact):
        asyncio.run(contact.answer())
        process.send_signal(signal.SIGSTOP)
        assert not asyncio.run(_is_silent_within(contact, 2.6))


@pytest.mark.parametrize("program", [_LISTENS, _CLOSES])
def test_a_node_is_silent_when_nothing_listens_any_more(program: str) -> None:
    with listening(program) as (process, contact):

        async def killed_meanwhile() -> str:
            silence = asyncio.create_task(contact.silence())
            await contact.answer()
            process.kill()
            return await asyncio.wait_for(silence, 10)

        host, port = contact.address
        assert asyncio.run(killed_meanwhile()) == f"{host}:{port} hasn't answered for 2 s"


def test_a_node_that_has_never_answered_is_not_lost() -> None:
    """A firewall may allow only the connections that Ray has already."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        contact = NodeContact(address=bound.getsockname(), lost_after_s=1)
        assert not asyncio.run(_is_silent_within(contact, 1.6))


def test_a_node_that_is_back_answers() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        contact = NodeContact(address=listener.getsockname())

        async def back() -> None:
            waiting = asyncio.create_task(contact.answer())
            await asyncio.sleep(0)
            listener.listen()
            await asyncio.wait_for(waiting, 10)

        asyncio.run(back())
