"""TCP ports at which ranks listen: any free one, or one of the range that the user allows."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from polytrain_plugins.port_users import are_closing, port_users

# Below Linux's default ephemeral range (32768–60999): the kernel never gives such a port to an
# outgoing connection, so no process takes it between the release and the framework's bind.
_FIRST, _LAST = 20000, 32000

_FREE_WITHIN_S = 5.0
_LOOKS_EVERY_S = 0.001
"""Seconds between looks at a port: nothing announces that it is free."""

_CLOSED_WITHIN_S = 65.0
"""Linux keeps the port of a connection that this side has closed for 60 s (TIME_WAIT)."""

_TRIES_AGAIN_EVERY_S = 0.25


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
def held_port(ports: range | None = None, *, shared: bool = False) -> Iterator[HeldPort]:
    """Choose a free TCP port and hold it while the block runs.

    Args:
        ports: those to choose from, `Member.ports`; None for any. If earlier connections keep all
            of them, this waits until the system frees one, for about a minute at most.
        shared: hold it with `SO_REUSEADDR`. A framework that sets that option too (gRPC does) can
            bind the port while it is held, so that the port is never free.

    Raises:
        OSError: no port is free; the message says what uses those of a range.
    """
    with _bound(ports) as holder:
        if shared:
            # Not before: two holders with this option could bind the same port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield HeldPort(number=holder.getsockname()[1], _socket=holder)


def listening_socket(host: str, ports: range | None = None) -> socket.socket:
    """Return a TCP socket that listens at an address, and at no other.

    Args:
        host: the address, `Member.listen_host`.
        ports: those to choose from, `Member.ports`; None for any.

    Raises:
        OSError: no port is free; the message says what uses those of a range.
    """
    if ports is None:
        return socket.create_server((host, 0))
    order = _in_random_order(ports)
    found = _first_free(order, lambda port: socket.create_server((host, port)))
    if found is None:
        raise _none_is_free(ports)
    return found


def _bound(ports: range | None) -> socket.socket:
    if ports is None:
        some = random.SystemRandom().sample(range(_FIRST, _LAST), k=200)
        bound = _first_free(some, _holder)
        if bound is None:
            raise OSError(f"no free TCP port found between {_FIRST} and {_LAST}")
        return bound
    end = time.monotonic() + _CLOSED_WITHIN_S
    while (bound := _first_free(_in_random_order(ports), _holder)) is None:
        # Frameworks that don't share ports can't bind that of a connection closed a moment ago.
        if time.monotonic() >= end or not are_closing(ports):
            raise _none_is_free(ports)
        time.sleep(_TRIES_AGAIN_EVERY_S)
    return bound


def _in_random_order(ports: range) -> list[int]:
    # The system's generator: forked worker processes inherit the state of the global one, and
    # would all try the same ports in the same order.
    return random.SystemRandom().sample(ports, k=len(ports))


def _first_free(ports: list[int], bind: Callable[[int], socket.socket]) -> socket.socket | None:
    for port in ports:
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return None


def _none_is_free(ports: range) -> OSError:
    which = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
    return OSError(
        f"no port of RunConfig(ports=…), {which}, is free: {'; '.join(port_users(ports))}. Allow "
        "more ports, or end what uses these"
    )


def _holder(port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind(("", port))
    except BaseException:
        holder.close()
        raise
    return holder


def _is_free(number: int) -> bool:
    try:
        _holder(number).close()
    except OSError:
        return False
    return True
