"""An agent's dealings with its node's zygotes: who forks its workers, and who tells their ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from polytrain.workers.messages import FrameBuffer
from polytrain.workers.process_connection import READ_SIZE
from polytrain.workers.processes.client import ZygoteConnection, ZygoteSpec


class Listener(Protocol):
    """Who wants to know what becomes of worker processes."""

    def process_started(self, attempt: int, pid: int) -> None:
        """The worker process runs as this process."""

    def process_ended(self, attempt: int, how: str, *, killed: bool) -> None:
        """Its process is gone."""

    def process_lost(self, attempt: int) -> None:
        """The zygote that had forked it is gone, and told no end of it."""


class Zygotes:
    """The node's zygote, which whoever needs it starts, and the one that has learned, if there is.

    The latter is a fork of the former, and ends with it. It exists from when it is ready on, so
    a launch that finds it uses it.

    All of it happens on the agent's event loop.
    """

    def __init__(self, spec: ZygoteSpec, *, tell: Listener) -> None:
        self._spec = spec
        self._tell = tell
        self._node: _Line | None = None
        self._preloaded: _Line | None = None

    def connect(self) -> None:
        """Have the node's zygote, so that it imports what worker processes need."""
        self._connected()

    def fork(
        self,
        attempt: int,
        *,
        environment: Mapping[str, str],
        directory: str,
        descriptors: Sequence[int],
    ) -> None:
        """Ask for a worker process.

        Raises:
            OSError: the zygote is gone.
        """
        node = self._connected()
        line = self._connected_to_preloaded() or node
        line.attempt = attempt
        line.connection.request(
            ["fork", attempt, dict(environment), directory, list(self._spec.path)], descriptors
        )

    def kill(self, attempt: int) -> None:
        """End a worker process at once. One whose zygote has just died is gone all the same."""
        for line in (self._node, self._preloaded):
            if line is not None and line.attempt == attempt:
                with contextlib.suppress(OSError):
                    line.connection.request(["kill", attempt])

    def preload(
        self,
        modules: Sequence[str],
        variables: Mapping[str, str | None],
        environment: Mapping[str, str],
        directory: str,
    ) -> None:
        """Have what a worker has imported imported for the next, unless that is done already."""
        if self._node is not None:
            with contextlib.suppress(OSError):
                self._node.connection.request(
                    ["learn", list(modules), dict(variables), dict(environment), directory]
                )

    async def close(self) -> None:
        """Leave; the zygote's worker processes end. Whoever started it waits for its end."""
        loop = asyncio.get_running_loop()
        for line in (self._preloaded, self._node):
            if line is not None:
                loop.remove_reader(line.connection.socket)
                await loop.run_in_executor(None, line.connection.close)
        self._node = self._preloaded = None

    def _connected(self) -> _Line:
        if self._node is None:
            self._node = self._listen(ZygoteConnection.open(self._spec))
        return self._node

    def _connected_to_preloaded(self) -> _Line | None:
        if self._preloaded is None:
            connection = ZygoteConnection.to_preloaded(self._spec)
            if connection is not None:
                self._preloaded = self._listen(connection)
        return self._preloaded

    def _listen(self, connection: ZygoteConnection) -> _Line:
        line = _Line(connection)
        asyncio.get_running_loop().add_reader(connection.socket, self._read, line)
        return line

    def _read(self, line: _Line) -> None:
        try:
            data = line.connection.socket.recv(READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(line)
            return
        for message in line.frames.feed(data):
            if message[0] == "forked":
                self._tell.process_started(message[1], message[2])
            else:
                self._tell.process_ended(message[1], message[2], killed=message[3])

    def _lost(self, line: _Line) -> None:
        asyncio.get_running_loop().remove_reader(line.connection.socket)
        line.connection.socket.close()
        if line is self._preloaded:
            self._preloaded = None
        else:
            self._node = None
        self._tell.process_lost(line.attempt)


class _Line:
    """A connection to a zygote, and the last attempt that was asked of it."""

    def __init__(self, connection: ZygoteConnection) -> None:
        self.connection = connection
        self.frames = FrameBuffer()
        self.attempt = -1
