"""A TCP port that is held from its choice until the framework binds it."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Below Linux's default ephemeral range (32768–60999): the kernel never gives such a port to an
# outgoing connection, so no process takes it between the release and the framework's bind.
_FIRST, _LAST = 20000, 32000

_FREE_WITHIN_S = 5.0
_LOOKS_EVERY_S = 0.001
"""Seconds between looks at a port: nothing announces that it is free."""


@dataclass(slots=True)
class HeldPort:
    """A bound port. `release` it immediately before the framework binds it."""

    number: int
    _socket: socket.socket

    def release(self) -> None:
        """Free the port. May be called more than once.

        A child process that this one has just forked holds the port, too, until it executes its
        program. So this waits until the port is free, for a few seconds at most.
        """
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        end = time.monotonic() + _FREE_WITHIN_S
        while not _is_free(self.number) and time.monotonic() < end:
            time.sleep(_LOOKS_EVERY_S)


@contextmanager
def held_port(*, shared: bool = False) -> Iterator[HeldPort]:
    """Choose a free TCP port and hold it while the block runs.

    Args:
        shared: hold it with `SO_REUSEADDR`. A framework that sets that option too (gRPC does) can
            bind the port while it is held, so that the port is never free.

    Raises:
        OSError: if no port of the range is free.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        number = _bind_any(holder)
        if shared:
            # Not before: two holders with this option could bind the same port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield HeldPort(number=number, _socket=holder)


def _is_free(number: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", number))
        except OSError:
            return False
    return True


def _bind_any(holder: socket.socket) -> int:
    # The system's generator: forked worker processes inherit the state of the global one, and
    # would all try the same ports in the same order.
    for port in random.SystemRandom().sample(range(_FIRST, _LAST), k=200):
        try:
            holder.bind(("", port))
        except OSError:
            continue
        return port
    raise OSError(f"no free TCP port found between {_FIRST} and {_LAST}")
