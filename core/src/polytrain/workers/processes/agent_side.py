"""The agent's connection to its node's zygote, which forks its worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from polytrain.workers.messages import FrameBuffer
from polytrain.workers.output_pipe import READ_SIZE
from polytrain.workers.processes.client import (
    PAUSE_S,
    ZygoteConnection,
    ZygoteSpec,
    attempts_to_connect,
)

_ENTRY = "polytrain.workers.worker_process"


class Listener(Protocol):
    """Is notified of the start and end of worker processes."""

    def process_started(self, attempt: int, pid: int) -> None:
        """The worker process has started with this process id."""

    def process_ended(self, attempt: int, how: str, *, killed: bool) -> None:
        """The worker process has ended."""

    def process_lost(self, attempt: int, why: str) -> None:
        """The worker process's zygote is gone; `why` is empty if it gave no reason."""


class Zygotes:
    """The agent's connection to its node's zygote, and to the next one if that ends.

    The first agent that needs the node's zygote starts it. All methods run on the agent's event
    loop.
    """

    def __init__(self, spec: ZygoteSpec, *, tell: Listener) -> None:
        self._spec = spec
        self._tell = tell
        self._node: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def connect(self) -> None:
        """Start or connect to the node's zygote, so that it imports what worker processes need.

        Raises:
            OSError: see `ZygoteConnection.open`.
        """
        async with self._connecting:
            if self._node is not None:
                return
            attempts = attempts_to_connect(self._spec)
            while (connection := next(attempts)) is None:
                await asyncio.sleep(PAUSE_S)
            if self._is_closed:
                connection.leave()
                return
            self._node = _Connection(connection)
            asyncio.get_running_loop().add_reader(connection.socket, self._read, self._node)

    def fork(
        self,
        attempt: int,
        *,
        environment: Mapping[str, str],
        directory: str,
        argv: Sequence[str],
        descriptors: Sequence[int],
    ) -> None:
        """Request a worker process.

        Raises:
            OSError: the zygote is gone.
        """
        zygote = self._node
        if zygote is None:
            raise ConnectionError("its zygote is gone")
        zygote.attempt = attempt
        try:
            path = list(self._spec.path)
            zygote.connection.request(
                ["fork", attempt, dict(environment), directory, path, list(argv), _ENTRY],
                descriptors,
            )
        except OSError as error:
            why = f"{error.strerror}, {zygote.why_lost}" if zygote.why_lost else error.strerror
            raise OSError(error.errno, why) from error

    def kill(self, attempt: int) -> None:
        """Kill a worker process. If its zygote is gone, so is the process."""
        if self._node is not None and self._node.attempt == attempt:
            with contextlib.suppress(OSError):
                self._node.connection.request(["kill", attempt])

    def preload(
        self,
        modules: Sequence[str],
        variables: Mapping[str, str | None],
        environment: Mapping[str, str],
        directory: str,
    ) -> None:
        """Request a preloaded zygote with what a worker process imported, unless there is one."""
        imported = [list(modules), dict(variables), dict(environment), directory]
        if self._node is not None:
            with contextlib.suppress(OSError):
                self._node.connection.request(["preload", _ENTRY, *imported])

    def close(self) -> subprocess.Popen[bytes] | None:
        """Disconnect, which ends this agent's worker processes.

        Returns:
            The node's zygote if this agent started it. It lives while other agents use it.
        """
        self._is_closed = True
        node, self._node = self._node, None
        if node is None:
            return None
        asyncio.get_running_loop().remove_reader(node.connection.socket)
        node.connection.leave()
        return node.connection.detach()

    def _read(self, zygote: _Connection) -> None:
        try:
            data = zygote.connection.socket.recv(READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(zygote)
            return
        for message in zygote.frames.feed(data):
            if message[0] == "forked":
                self._tell.process_started(message[1], message[2])
            elif message[0] == "dying":
                zygote.why = message[1]
            else:
                self._tell.process_ended(message[1], message[2], killed=message[3])

    def _lost(self, zygote: _Connection) -> None:
        asyncio.get_running_loop().remove_reader(zygote.connection.socket)
        why = zygote.why_lost
        zygote.connection.leave()
        self._node = None
        self._tell.process_lost(zygote.attempt, why)


class _Connection:
    """A connection to a zygote, and the last attempt that it forked for."""

    def __init__(self, connection: ZygoteConnection) -> None:
        self.connection = connection
        self.frames = FrameBuffer()
        self.attempt = -1
        self.why = ""
        """The zygote's reason for its end; empty if it gave none."""

    @property
    def why_lost(self) -> str:
        """What is known of the reason for the zygote's end."""
        output = self.connection.last_output()
        return self.why or (output and f"its last output was:\n{output}")
