"""Tries the connections between nodes: an actor on each listens and connects as ranks do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayTaskError

from polytrain.policy.links import FailedLink, targets
from polytrain_plugins import listening_socket

_WORD_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a node listens."""

    host: str
    port: int
    word: bytes
    """What it says to whoever connects, by which it is known."""


class LinkEnd:
    """The end of one node. It is thread-safe, and listens only while it is asked to."""

    def __init__(self, host: str, ports: range | None = None) -> None:
        """
        Args:
            host: the node's address, at which its ranks listen.
            ports: the ports at which they listen; None for any.
        """
        self._host, self._ports = host, ports
        self._socket: socket.socket | None = None

    def listen(self) -> Listening:
        """Listen as a rank does.

        Raises:
            OSError: the address isn't this machine's, or no port is free.
        """
        self.stop_listening()
        word = secrets.token_bytes(_WORD_BYTES)
        self._socket = listening_socket(self._host, self._ports)
        serve = threading.Thread(
            target=_serve, args=(self._socket, word), name="polytrain-links", daemon=True
        )
        serve.start()
        return Listening(host=self._host, port=self._socket.getsockname()[1], word=word)

    def reach(self, others: Sequence[Listening], timeout_s: float) -> list[str]:
        """Connect to all of these at once.

        Args:
            timeout_s: seconds that this takes at most.

        Returns:
            Why each of them can't be reached; empty for one that can.
        """
        if not others:
            return []
        with ThreadPoolExecutor(len(others)) as pool:
            return list(pool.map(lambda other: _reached(other, timeout_s), others))

    def stop_listening(self) -> None:
        """Close the port."""
        if self._socket is not None:
            # Closing it alone doesn't wake the thread that accepts connections.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None


def _serve(listener: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(word)


def _reached(other: Listening, timeout_s: float) -> str:
    try:
        with socket.create_connection((other.host, other.port), timeout_s) as connection:
            try:
                heard = connection.recv(_WORD_BYTES, socket.MSG_WAITALL)
            except TimeoutError:
                # The connection is there; the other process is busy.
                return ""
    except TimeoutError:
        return f"port {other.port} doesn't answer within {timeout_s:g} s"
    except OSError as error:
        return f"port {other.port}: {error.strerror or error}"
    return "" if heard == other.word else f"port {other.port} is another machine's"


async def failed_links(
    ends: Sequence[Any], hosts: Sequence[str], *, timeout_s: float
) -> list[FailedLink]:
    """Have the nodes connect to each other, all at the same time; return what failed.

    Args:
        ends: an actor on each node, with the methods of `LinkEnd`.
        hosts: the nodes' addresses.
        timeout_s: seconds that a connection may take.

    Raises:
        RayError: an actor is gone.
    """
    try:
        answers = await asyncio.gather(*(_listening(end) for end in ends))
        failed = [
            FailedLink(source=host, target=host, reason=answer)
            for host, answer in zip(hosts, answers, strict=True)
            if isinstance(answer, str)
        ]
        tried = [
            [other for other in others if isinstance(answers[other], Listening)]
            for others in targets(len(ends))
        ]
        reached = await asyncio.gather(
            *(
                end.reach.remote([answers[other] for other in others], timeout_s)
                for end, others in zip(ends, tried, strict=True)
            )
        )
    finally:
        for end in ends:
            end.stop_listening.remote()
    failed += [
        FailedLink(source=hosts[node], target=hosts[other], reason=reason)
        for node, reasons in enumerate(reached)
        for other, reason in zip(tried[node], reasons, strict=True)
        if reason
    ]
    return failed


async def _listening(end: Any) -> Listening | str:
    try:
        listening: Listening = await end.listen.remote()
    except RayTaskError as error:
        return str(getattr(error.cause, "strerror", None) or error.cause)
    return listening
