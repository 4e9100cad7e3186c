"""A small collective beside LightGBM's, which its Python package gives no access to.

All ranks are connected to rank 0, which hears everybody and tells everybody: enough to agree on
bins before a round is boosted, to see one metric, and to take one decision in one round.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from polytrain_plugins import World

_LENGTH = struct.Struct("<Q")
_RETRY_S = 5.0
"""Seconds for one who has connected to say who it is; ranks say so at once."""


class Star:
    """Everybody's connections to rank 0."""

    def __init__(self, peers: Sequence[socket.socket], *, rank: int = 0) -> None:
        """
        Args:
            peers: rank 0: to the others, by rank. Others: to rank 0.
            rank: whose ends they are.
        """
        self.rank = rank
        self._peers = peers

    def gathered(self, piece: Any) -> list[Any]:
        """Everybody's piece, by rank. Every rank calls it, with whatever can be pickled."""
        everybodys: list[Any] = self.told(self.heard(piece))
        return everybodys

    def heard(self, piece: Any) -> list[Any] | None:
        """Everybody's piece, by rank, for rank 0; None for the others."""
        if self.rank != 0:
            _send(self._peers[0], pickle.dumps(piece, pickle.HIGHEST_PROTOCOL))
            return None
        return [piece, *(pickle.loads(_receive(peer)) for peer in self._peers)]

    def told(self, piece: Any) -> Any:
        """Rank 0's piece, for everybody."""
        if self.rank != 0:
            return pickle.loads(_receive(self._peers[0]))
        message = pickle.dumps(piece, pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            _send(peer, message)
        return piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Center:
    """Where rank 0 is waiting for the others."""

    listener: socket.socket
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """Who doesn't know it isn't one of the ranks."""

    @property
    def details(self) -> Mapping[str, Any]:
        """What the others have to know."""
        return {"star_port": self.listener.getsockname()[1], "star_key": self.key}


@contextmanager
def center() -> Iterator[Center]:
    """Listen on any port."""
    with socket.create_server(("", 0)) as listener:
        yield Center(listener=listener)


@contextmanager
def star(world: World, center: Center | None) -> Iterator[Star]:
    """Connect every rank to rank 0, whose offer names its center."""
    with ExitStack() as stack:
        if center is not None:
            peers = _accepted(center, world.size - 1, stack)
        else:
            leader = world.leader
            address = (leader.host, leader.details["star_port"])
            peers = [stack.enter_context(socket.create_connection(address))]
            _send(peers[0], f"{leader.details['star_key']} {world.me.rank}".encode())
        for peer in peers:
            # Messages are tiny and answered at once: none may wait to be joined by another.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Star(peers, rank=world.me.rank)


def _accepted(center: Center, count: int, stack: ExitStack) -> list[socket.socket]:
    """The others' connections, by rank."""
    found: dict[int, socket.socket] = {}
    while len(found) < count:
        peer = stack.enter_context(center.listener.accept()[0])
        peer.settimeout(_RETRY_S)
        try:
            key, _, rank = _receive(peer, at_most=64).decode().partition(" ")
        except (OSError, ValueError):
            continue
        if hmac.compare_digest(key, center.key):
            peer.settimeout(None)
            found[int(rank)] = peer
    return [found[rank] for rank in sorted(found)]


def _send(peer: socket.socket, message: bytes) -> None:
    peer.sendall(_LENGTH.pack(len(message)) + message)


def _receive(peer: socket.socket, *, at_most: int | None = None) -> bytes:
    [length] = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    if at_most is not None and length > at_most:
        raise ConnectionError("that is no worker of this run")
    return _exactly(peer, length)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = peer.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("a worker has left the training")
        got += count
    return bytes(data)
