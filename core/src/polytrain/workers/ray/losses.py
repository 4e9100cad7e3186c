"""Why an actor of Ray is lost, and that a node has lost its power or its network.

Ray notices the latter after about a minute, because it counts messages that aren't answered. Here
the kernels do it: the driver keeps a TCP connection to each node's raylet. Its kernel sends
keepalive probes (RFC 9293, section 3.8.4), and the node's kernel answers, however busy or stopped
the processes there are. So a slow node isn't lost, and a quiet one costs the driver nothing.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from polytrain.config.runtime_env import cause_of, named
from polytrain.errors import FailureKind
from polytrain.policy.placement import NodeAddress
from polytrain.ray_api.state import death_of_node, is_reachable, raylet_addresses


def why_gone(
    error: RayError, place: NodeAddress | None, runtime_env: Mapping[str, Any]
) -> tuple[FailureKind, str]:
    """Return the kind of the loss, and the reason in words.

    Args:
        place: its node; None if it hasn't arrived.
        runtime_env: the runtime environment in its request; empty if it has the job's.
    """
    if isinstance(error, RayTaskError):
        return FailureKind.AGENT_LOST, f"{type(error.cause).__name__}: {error.cause}"
    death = death_of_node(place.node_id) if place is not None else None
    if getattr(error, "preempted", False):
        return FailureKind.PREEMPTED, f"its node was preempted ({death or 'as announced'})"
    if place is not None and death is not None:
        return FailureKind.NODE_LOST, f"its node {place.host} is gone ({death})"
    # Ray reports the loss of the actor before it has confirmed that the node is gone.
    if place is not None and not is_reachable(place.node_id):
        return FailureKind.NODE_LOST, f"its node {place.host} is gone (its raylet is)"
    if place is not None and isinstance(error, ActorUnavailableError):
        return FailureKind.AGENT_LOST, "its agent can't be reached any more"
    if isinstance(error, RuntimeEnvSetupError):
        # The runtime environment fails alike on every node.
        cause = cause_of(error.error_message)
        which = named(runtime_env) if runtime_env else "the runtime_env of the Ray job"
        return FailureKind.STARTUP, f"{which} can't be set up: {cause}"
    detail = _detail(str(error))
    if isinstance(error, OutOfMemoryError):
        return FailureKind.OUT_OF_MEMORY, f"Ray has ended its agent to free memory ({detail})"
    if place is None:
        where = "Ray's logs say why, on the nodes in /tmp/ray/session_latest/logs"
        return FailureKind.AGENT_LOST, f"its agent died while it started ({detail}). {where}"
    return FailureKind.AGENT_LOST, f"its agent has died ({detail})"


_RAISED = "raised in its creation task"

_OF_TRACEBACK = re.compile(r' +(File ".*|[~^]+)$')


def _detail(text: str) -> str:
    """Return Ray's message without its general advice, or what the actor's start has raised."""
    if _RAISED in text:
        lines = text.splitlines()
        # The exception follows the traceback, of whose lines Ray leaves its own out.
        ends = [number for number, line in enumerate(lines) if _OF_TRACEBACK.match(line)]
        after = lines[ends[-1] :] if ends else lines
        return next((line for line in after if line.strip() and line[0] != " "), lines[0])
    detail = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    first_lines = [line.strip() for line in (detail or text).splitlines() if line.strip()]
    return first_lines[0] if first_lines else "Ray doesn't say why"


_PROBE_S = 1.0
"""Seconds between two probes, and between two attempts to connect."""

_ACKNOWLEDGED = struct.Struct("=56xI")
"""The field `tcpi_last_ack_recv`, in milliseconds, of Linux's `tcp_info`."""


@dataclass(kw_only=True)
class NodeContact:
    """The contact to one node."""

    address: tuple[str, int]
    """Where the node's raylet listens."""

    lost_after_s: float = 5.0
    """Seconds without an answer after which a node is lost. It may be up to `_PROBE_S` less."""

    _answered_at: float = field(default_factory=time.monotonic)

    async def silence(self) -> str:
        """Wait until the node is silent, and return what was tried.

        A node that has never answered isn't lost: a firewall may allow Ray's own connections only.
        """
        await self.answer()
        asked_at = time.monotonic()
        while True:
            began = time.monotonic()
            connection = await self._connected()
            now = time.monotonic()
            if now > asked_at + self.lost_after_s + _PROBE_S:
                # This process was stopped meanwhile, and has asked once.
                self._answered_at = now
            answers = connection is not None and await self._hold(connection)
            # Time alone says nothing: this process may have been stopped, and has asked nobody.
            if not answers and time.monotonic() >= self._answered_at + self.lost_after_s:
                break
            asked_at = time.monotonic()
            # Nothing listens there any more, or the raylet ends connections at once.
            await asyncio.sleep(max(0.0, began + _PROBE_S - time.monotonic()))
        host, port = self.address
        return f"{host}:{port} hasn't answered for {self.lost_after_s:g} s"

    async def answer(self) -> None:
        """Wait until the node answers."""
        while (connection := await self._connected()) is None:
            await asyncio.sleep(_PROBE_S)
        connection.close()

    async def _connected(self) -> socket.socket | None:
        """Return a new connection; None if there is no answer, or a refusal."""
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            # Not longer: the kernel repeats an unanswered attempt at growing intervals.
            await asyncio.wait_for(
                asyncio.get_running_loop().sock_connect(connection, self.address), _PROBE_S
            )
            self._probe(connection)
        except OSError:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        self._answered_at = time.monotonic()
        return connection

    def _probe(self, connection: socket.socket) -> None:
        """Have the kernel probe a connection, and end it if no probe is answered in time."""
        unanswered = max(1, round(self.lost_after_s / _PROBE_S) - 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, round(_PROBE_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, round(_PROBE_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, unanswered)

    async def _hold(self, connection: socket.socket) -> bool:
        """Wait for the end of a connection; return whether the node has ended it."""
        loop = asyncio.get_running_loop()
        with connection:
            try:
                # The raylet greets, and ends a connection that says nothing after two minutes.
                while await loop.sock_recv(connection, 1024):
                    pass
            except OSError:  # a refusal, or a probe that found no way or got no answer
                self._answered_at = time.monotonic() - _seconds_since_answer(connection)
                return False
        self._answered_at = time.monotonic()
        return True


class NodeContacts:
    """The contacts to a cluster's nodes. One event loop's tasks share it."""

    def __init__(self) -> None:
        self._raylets: dict[str, tuple[str, int]] = {}
        """Where the raylet of each known node listens."""

        self._lock = asyncio.Lock()

    async def to(self, node: str) -> NodeContact:
        """Return the contact to a node.

        Raises:
            KeyError: Ray knows no such node.
        """
        # Ray lists all nodes at once, and many hosts arrive at once: ask it seldom.
        async with self._lock:
            if node not in self._raylets:
                self._raylets = await asyncio.to_thread(raylet_addresses)
        return NodeContact(address=self._raylets[node])


def _seconds_since_answer(connection: socket.socket) -> float:
    """Return the seconds since the node's kernel has last acknowledged something."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.size)
    milliseconds: int = _ACKNOWLEDGED.unpack(information)[0]
    return milliseconds / 1000
