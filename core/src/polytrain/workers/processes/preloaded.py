"""Controls the preloaded zygote, a fork of the node's zygote with more imports, from the latter.

Clients connect only to the node's zygote. It forwards their requests over a socket that the fork
has inherited, so the preloaded zygote needs no address, which others could take.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from polytrain.workers.processes.channel import FrameBuffer, send_request
from polytrain.workers.processes.forked import watched

_TAKEN_WITHIN_S = 10.0
"""Seconds within which it must read a request."""

_READ_SIZE = 1 << 16

Answer = tuple[socket.socket, list[Any]]
"""A client, and a message for it."""


@dataclass(slots=True)
class Preloaded:
    """The preloaded zygote: its process, the connection to it, and the clients of its workers."""

    pid: int
    pidfd: int
    connection: socket.socket
    entry: str
    """The entry whose processes it forks; others, such as validations, outlive it."""

    is_ready: bool = False
    """Whether it has imported everything, and can fork."""

    _why: str = ""
    """Its reason for its end; empty if it gave none."""

    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _workers: dict[int, tuple[socket.socket, int]] = field(default_factory=dict)
    """Its number for a worker process → the client, and the client's number for it."""

    _frames: FrameBuffer = field(default_factory=FrameBuffer)

    @classmethod
    def forked(cls, entry: str, become: Callable[[socket.socket], NoReturn]) -> Preloaded | None:
        """Fork this process.

        Args:
            become: called in the fork, with its connection to this process.

        Returns:
            The preloaded zygote, which only saves time; None if the system refuses the fork.
        """
        with contextlib.suppress(OSError), contextlib.ExitStack() as unless_forked:
            ours, theirs = map(unless_forked.enter_context, socket.socketpair())
            pid = os.fork()
            if pid == 0:
                become(theirs)
            preloaded = cls(pid, watched(pid), ours, entry)
            unless_forked.pop_all()
            theirs.close()
            return preloaded
        return None

    def fork(self, client: socket.socket, request: Sequence[Any], descriptors: list[int]) -> None:
        """Pass on a client's request for a worker process.

        Raises:
            OSError: it is gone, or takes no request.
        """
        number = next(self._numbers)
        kind, client_number, *others = request
        self._send([kind, number, *others], descriptors)
        self._workers[number] = client, client_number

    def kill(self, client: socket.socket, client_number: int | None = None) -> None:
        """Kill a client's worker process with this number, by default all of the client's.

        Raises:
            OSError: it is gone, or takes no request.
        """
        for number, worker in self._workers.items():
            if worker == (client, client_number) or (client_number is None and worker[0] is client):
                self._send(["kill", number])

    def read(self) -> list[Answer]:
        """Read all its messages; return its answers to clients."""
        answers = []
        while data := self._received():
            for message in self._frames.feed(data):
                match message:
                    case ["ready"]:
                        self.is_ready = True
                    case ["dying", why]:
                        self._why = why
                    case [kind, number, *others]:
                        client, client_number = self._workers[number]
                        if kind == "ended":
                            del self._workers[number]
                        answers.append((client, [kind, client_number, *others]))
        return answers

    def end(self) -> None:
        """Kill it, and wait for its end. Its worker processes die with it."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        # No time limit: a client waits a second for its answer, then kills this process.
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.connection.close()

    def unanswered(self) -> list[Answer]:
        """Return the answers to clients whose worker processes have died with it."""
        how = f"its zygote died{self._why and ': '}{self._why}".strip()
        return [
            (client, ["ended", client_number, how, False])
            for client, client_number in self._workers.values()
        ]

    def _received(self) -> bytes:
        try:
            return self.connection.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def _send(self, request: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        self.connection.settimeout(_TAKEN_WITHIN_S)
        try:
            send_request(self.connection, request, descriptors)
        finally:
            self.connection.settimeout(None)
