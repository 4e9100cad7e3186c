"""A group of processes of this process, forked by the zygote that runs use."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from polytrain.linux.progress_page import Page
from polytrain.workers.messages import ConnectionClosedError, FrameBuffer
from polytrain.workers.output_pipe import READ_SIZE
from polytrain.workers.processes.cache import keep, kept_or_new_zygote
from polytrain.workers.processes.client import ZygoteSpec

_NODE = "this process"
_ENDS_WITHIN_S = 10.0


class ForkedGroup:
    """Forked processes, none of which is left behind. The next group may have the same zygote."""

    def __init__(self, entry: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """
        Args:
            entry: module whose `run_and_exit` each process runs.
            modules: imported before. One that can't be imported fails again in the process.
            environment: variables of the processes, besides those of this one.
        """
        self._entry = entry
        self._environment = {**os.environ, **environment}
        spec = ZygoteSpec(
            name="", environment=environment, modules=(entry, *modules), path=tuple(sys.path)
        )
        self._zygote = kept_or_new_zygote(spec, _NODE)
        self._frames = FrameBuffer()
        self._page = Page()
        self._started: list[int] = []
        self.ends: dict[int, str] = {}
        """Number of a process → how it has ended."""

    def __enter__(self) -> ForkedGroup:
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
            for number in self._started:
                zygote.request(["kill", number])
            zygote.socket.settimeout(_ENDS_WITHIN_S)
            while len(self.ends) < len(self._started):
                self.read()
            zygote.socket.settimeout(None)
        except OSError:
            # Its processes end with it.
            zygote.end()
        else:
            keep(self._zygote)

    def fileno(self) -> int:
        """A descriptor that is readable when `read` has something to read."""
        return self._zygote.connection.socket.fileno()

    def fork(self, number: int, connection: socket.socket) -> None:
        """Fork a process with this number, and a copy of this socket."""
        self._started.append(number)
        self._zygote.connection.request(
            ["fork", number, self._environment, os.getcwd(), sys.path, sys.argv, self._entry],
            [connection.fileno(), 1, 2, self._page.descriptor],
        )

    def end_of(self, number: int) -> str:
        """Return how a process has ended that has closed its connection; kill it if it hasn't."""
        zygote = self._zygote.connection
        zygote.socket.settimeout(_ENDS_WITHIN_S)
        try:
            while number not in self.ends:
                self.read()
        except TimeoutError:
            zygote.request(["kill", number])
            return f"killed {_ENDS_WITHIN_S:g} s after the end of its connection"
        finally:
            zygote.socket.settimeout(None)
        return self.ends[number]

    def read(self) -> None:
        """Record the ends that the zygote has reported, once there is one.

        Raises:
            ConnectionClosedError: the zygote is gone.
            TimeoutError: the time that the caller has set is over.
        """
        data = self._zygote.connection.socket.recv(READ_SIZE)
        if not data:
            raise ConnectionClosedError("the zygote of the processes is gone")
        for message in self._frames.feed(data):
            if message[0] == "ended":
                self.ends[message[1]] = message[2]
