"""The processes of a local world's ranks, forked by the zygote that runs use."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from polytrain.monitoring.progress_page import Page
from polytrain.workers.messages import ConnectionClosedError, FrameBuffer
from polytrain.workers.process_connection import READ_SIZE
from polytrain.workers.processes.cache import keep, warm_zygote
from polytrain.workers.processes.client import ZygoteSpec

_ENTRY = "polytrain.testing.local_rank"
_NODE = "local world"
_ENDS_WITHIN_S = 10.0


class RankProcesses:
    """Forked processes, none of which is left behind. The next world may have the same zygote."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """
        Args:
            modules: imported before. One that can't be imported fails again in the rank.
            environment: variables of the ranks, besides those of this process.
        """
        self._environment = {**os.environ, **environment}
        spec = ZygoteSpec(
            name="", environment=environment, modules=(_ENTRY, *modules), path=tuple(sys.path)
        )
        self._zygote = warm_zygote(spec, _NODE)
        self._frames = FrameBuffer()
        self._page = Page()
        self._started: list[int] = []
        self.ends: dict[int, str] = {}
        """Rank → how its process has ended."""

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._page.close()
        zygote = self._zygote.connection
        try:
            for rank in self._started:
                zygote.request(["kill", rank])
            zygote.socket.settimeout(_ENDS_WITHIN_S)
            while len(self.ends) < len(self._started):
                self.read()
            zygote.socket.settimeout(None)
        except OSError:
            # Its ranks end with it.
            zygote.end()
        else:
            keep(self._zygote)

    def fileno(self) -> int:
        """A descriptor that is readable when `read` has something to read."""
        return self._zygote.connection.socket.fileno()

    def fork(self, rank: int, connection: socket.socket) -> None:
        """Have a process that is this rank, with a copy of this socket."""
        self._started.append(rank)
        self._zygote.connection.request(
            ["fork", rank, self._environment, os.getcwd(), list(sys.path), _ENTRY],
            [connection.fileno(), 1, 2, self._page.descriptor],
        )

    def read(self) -> None:
        """Record the ends that the zygote has reported.

        Raises:
            ConnectionClosedError: the zygote is gone.
        """
        data = self._zygote.connection.socket.recv(READ_SIZE)
        if not data:
            raise ConnectionClosedError("the zygote of the local world is gone")
        for message in self._frames.feed(data):
            if message[0] == "ended":
                self.ends[message[1]] = message[2]
