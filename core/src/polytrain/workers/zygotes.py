"""An agent's dealings with its node's zygotes: who forks its trainers, and who tells their ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from polytrain.workers.trainer_line import READ_SIZE
from polytrain.workers.wire import FrameBuffer
from polytrain.workers.zygote_client import ZygoteConnection, ZygoteSpec


class Listener(Protocol):
    """Who wants to know what becomes of trainers."""

    def trainer_forked(self, generation: int, pid: int) -> None:
        """The trainer runs as this process."""

    def trainer_ended(self, generation: int, how: str, *, killed: bool) -> None:
        """Its process is gone."""

    def trainer_lost(self, generation: int) -> None:
        """The zygote that had forked it is gone, and told no end of it."""


class Zygotes:
    """The node's zygote, which is started by whoever needs it first, on this node and ever again.

    All of it happens on the agent's event loop.
    """

    def __init__(self, spec: ZygoteSpec, *, tell: Listener) -> None:
        self._spec = spec
        self._tell = tell
        self._node: _Line | None = None

    def connect(self) -> None:
        """Have the node's zygote, so that it imports what trainers need."""
        self._connected()

    def fork(
        self,
        generation: int,
        *,
        environment: Mapping[str, str],
        directory: str,
        descriptors: Sequence[int],
    ) -> None:
        """Ask for a trainer.

        Raises:
            OSError: the zygote is gone.
        """
        line = self._connected()
        line.generation = generation
        line.connection.request(
            ["fork", generation, dict(environment), directory, list(self._spec.path)], descriptors
        )

    def kill(self, generation: int) -> None:
        """End a trainer at once. One whose zygote has just died is gone all the same."""
        if self._node is not None:
            with contextlib.suppress(OSError):
                self._node.connection.request(["kill", generation])

    def _connected(self) -> _Line:
        if self._node is None:
            self._node = self._listen(ZygoteConnection(self._spec))
        return self._node

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
                self._tell.trainer_forked(message[1], message[2])
            else:
                self._tell.trainer_ended(message[1], message[2], killed=message[3])

    def _lost(self, line: _Line) -> None:
        asyncio.get_running_loop().remove_reader(line.connection.socket)
        line.connection.socket.close()
        self._node = None
        self._tell.trainer_lost(line.generation)


class _Line:
    """A connection to a zygote, and the last generation that was asked of it."""

    def __init__(self, connection: ZygoteConnection) -> None:
        self.connection = connection
        self.frames = FrameBuffer()
        self.generation = -1
