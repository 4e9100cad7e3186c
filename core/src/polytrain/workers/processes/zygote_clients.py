"""A zygote's clients: their connections and processes.

A client is gone when its connection or its process ends: a child that it has forked may outlive it
with an open connection.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Iterator

from polytrain.linux.processes import is_readable, peer_of


class Clients:
    """Connections from processes of this user, and a pidfd for each of these processes.

    The zygote's selector watches both.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._processes: dict[socket.socket, int | None] = {}
        """Client → the pidfd of its process; None if the process can't be watched from here."""

        self._pidfds: dict[int, int] = {}
        """Process id → pidfd."""

        self._spare = _any_descriptor()
        """A spare descriptor, to accept and close a connection when none is left."""

    def __contains__(self, client: object) -> bool:
        return client in self._processes

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(list(self._processes))

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, client: socket.socket, pidfd: int | None = None) -> None:
        """Add a client, with the pidfd of its process if that can be watched."""
        self._processes[client] = pidfd
        self._selector.register(client, selectors.EVENT_READ)

    def accept(self, listener: socket.socket) -> socket.socket | None:
        """Accept and add a client; return its connection only if its process has already ended."""
        try:
            client, _ = listener.accept()
        except OSError:
            self._turn_away(listener)
            return None
        # An abstract address has no permissions: the kernel names the client's user.
        pid, uid = peer_of(client)
        if uid != os.getuid():
            client.close()
            return None
        try:
            self.add(client, self._watched(pid))
        except ProcessLookupError:
            self.add(client)
            return client
        except OSError:
            client.close()
        return None

    def drop(self, client: socket.socket) -> None:
        """Close the connection of a client."""
        self._selector.unregister(client)
        client.close()
        pidfd = self._processes.pop(client)
        if pidfd is not None and pidfd not in self._processes.values():
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._pidfds = {pid: other for pid, other in self._pidfds.items() if other != pidfd}

    def of_process(self, pidfd: object) -> list[socket.socket]:
        """Return the clients of a process."""
        return [client for client, other in self._processes.items() if other == pidfd]

    def _watched(self, pid: int) -> int | None:
        if pid == 0:
            # It is in another PID namespace, and has no id here.
            return None
        known = self._pidfds.get(pid)
        # The id may have been reused for another process.
        if known is not None and not is_readable(known):
            return known
        pidfd = self._pidfds[pid] = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ)
        return pidfd

    def _turn_away(self, listener: socket.socket) -> None:
        """Accept and close a connection for which no descriptor is left, so that it can't wait."""
        with contextlib.suppress(OSError):
            os.close(self._spare)
            listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = _any_descriptor()


def _any_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
