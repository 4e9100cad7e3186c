"""A small collective beside LightGBM's, which its Python package gives no access to.

Rank 0 adds up what everybody sends and returns the sum: enough for all ranks to take one decision
in one round, and to see one metric.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from polytrain_plugins import World


class Star:
    """Everybody's connections to rank 0."""

    def __init__(self, peers: Sequence[socket.socket], *, is_center: bool) -> None:
        self._peers = peers
        self._is_center = is_center

    def sum(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum of every rank's values, the same everywhere to the last bit."""
        if not self._is_center:
            self._peers[0].sendall(_pack(values))
            return _receive(self._peers[0], len(values))
        total = list(values)
        for peer in self._peers:
            total = [a + b for a, b in zip(total, _receive(peer, len(values)), strict=True)]
        for peer in self._peers:
            peer.sendall(_pack(total))
        return total


@contextmanager
def star(world: World, listener: socket.socket | None) -> Iterator[Star]:
    """Connect every rank to rank 0, whose listener the offer names."""
    with ExitStack() as stack:
        if listener is not None:
            peers = [stack.enter_context(listener.accept()[0]) for _ in range(world.size - 1)]
        else:
            address = (world.leader.host, world.leader.details["star_port"])
            peers = [stack.enter_context(socket.create_connection(address))]
        for peer in peers:
            # Messages are tiny and answered at once: none may wait to be joined by another.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Star(peers, is_center=listener is not None)


def _pack(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def _receive(peer: socket.socket, count: int) -> list[float]:
    size = 8 * count
    data = peer.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("a worker has left the training")
    return list(struct.unpack(f"<{count}d", data))
