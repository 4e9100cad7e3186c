"""Connects an event loop to the node's zygote, which forks processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from polytrain.workers.processes.channel import FrameBuffer
from polytrain.workers.processes.output_pipe import READ_SIZE
from polytrain.workers.processes.zygote_connection import (
    PAUSE_S,
    ZygoteConnection,
    ZygoteSpec,
    attempts_to_connect,
)


class Listener(Protocol):
    """Is notified of the start and end of processes, by the numbers of its requests."""

    def process_started(self, number: int, pid: int) -> None:
        """Handle that the process has started with this process id."""

    def process_ended(self, number: int, how: str, *, killed: bool) -> None:
        """Handle that the process has ended, or couldn't be started.

        Args:
            how: description of its end, for people.
            killed: whether it was alive when a kill was requested.
        """

    def process_lost(self, number: int, why: str) -> None:
        """Handle that the process's zygote is gone; `why` is empty if it gave no reason."""


class ZygoteClient:
    """The connection to the node's zygote, and to the next one if that ends.

    The first client starts the node's zygote. All methods run on one event loop.
    """

    def __init__(self, spec: ZygoteSpec, entry: str, *, listener: Listener) -> None:
        """
        Args:
            entry: the module whose `main` the processes run.
            listener: is notified of the start and end of each process.
        """
        self._spec = spec
        self._entry = entry
        self._listener = listener
        self._node: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def connect(self) -> None:
        """Start or connect to the node's zygote, so that it imports the processes' modules.

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
        number: int,
        *,
        environment: Mapping[str, str],
        directory: str,
        argv: Sequence[str],
        descriptors: Sequence[int],
    ) -> None:
        """Request a process.

        Raises:
            OSError: the zygote is gone.
        """
        zygote = self._node
        if zygote is None:
            raise ConnectionError("its zygote is gone")
        try:
            path = list(self._spec.path)
            zygote.connection.request(
                ["fork", number, dict(environment), directory, path, list(argv), self._entry],
                descriptors,
            )
        except OSError as error:
            why = f"{error.strerror}, {zygote.why_lost}" if zygote.why_lost else error.strerror
            raise OSError(error.errno, why) from error
        zygote.running.add(number)

    def kill(self, number: int) -> None:
        """Kill a process. If its zygote is gone, the process is gone too."""
        if self._node is not None and number in self._node.running:
            with contextlib.suppress(OSError):
                self._node.connection.request(["kill", number])

    def preload(
        self,
        modules: Sequence[str],
        variables: Mapping[str, str | None],
        environment: Mapping[str, str],
        directory: str,
    ) -> None:
        """Request a preloaded zygote with a process's imports, unless there is one."""
        imported = [list(modules), dict(variables), dict(environment), directory]
        if self._node is not None:
            with contextlib.suppress(OSError):
                self._node.connection.request(["preload", self._entry, *imported])

    def close(self) -> subprocess.Popen[bytes] | None:
        """Disconnect, which ends these processes.

        Returns:
            The node's zygote if it was started here. It lives while other clients use it.
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
                self._listener.process_started(message[1], message[2])
            elif message[0] == "dying":
                zygote.why = message[1]
            else:
                _, number, how, killed = message
                zygote.running.discard(number)
                self._listener.process_ended(number, how, killed=killed)

    def _lost(self, zygote: _Connection) -> None:
        asyncio.get_running_loop().remove_reader(zygote.connection.socket)
        why = zygote.why_lost
        zygote.connection.leave()
        self._node = None
        for number in zygote.running:
            self._listener.process_lost(number, why)


class _Connection:
    """A connection to a zygote, and the processes that it has forked for it."""

    def __init__(self, connection: ZygoteConnection) -> None:
        self.connection = connection
        self.frames = FrameBuffer()
        self.running: set[int] = set()
        """Numbers of the processes whose end hasn't been reported."""

        self.why = ""
        """The zygote's reason for its end; empty if it gave none."""

    @property
    def why_lost(self) -> str:
        """Return the known reason for the zygote's end."""
        output = self.connection.last_output()
        return self.why or (output and f"its last output was:\n{output}")
