"""A small collective between ranks, since LightGBM's Python package doesn't expose its own.

All ranks are connected to rank 0, which gathers and broadcasts objects. This suffices to agree on
bins before training, and on metrics and early stopping in a round. Objects are pickled, so only
authenticated ranks may send them (`connections`).
"""

from __future__ import annotations

import pickle
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from polytrain_lightgbm.connections import RankConnection, accept_ranks, connect_to_leader
from polytrain_plugins import World, listening_socket

_TOGETHER_S = 300.0
"""Seconds for all ranks to connect. They all start when they have each other's offers."""


class Collective:
    """The ranks of one attempt, connected to rank 0."""

    def __init__(self, peers: Sequence[RankConnection], *, rank: int = 0) -> None:
        """
        Args:
            peers: on rank 0, the connections to the others, by rank; elsewhere, that to rank 0.
            rank: this rank.
        """
        self.rank = rank
        self._peers = peers

    def all_gather(self, piece: Any) -> list[Any]:
        """Return every rank's piece, by rank. Every rank calls it, with a picklable object."""
        pieces: list[Any] = self.broadcast(self.gather(piece))
        return pieces

    def gather(self, piece: Any) -> list[Any] | None:
        """Return every rank's piece, by rank, on rank 0; None on the others."""
        if self.rank != 0:
            self._peers[0].send(pickle.dumps(piece, pickle.HIGHEST_PROTOCOL))
            return None
        return [piece, *(pickle.loads(peer.receive()) for peer in self._peers)]

    def broadcast(self, piece: Any) -> Any:
        """Return rank 0's piece on every rank."""
        if self.rank != 0:
            return pickle.loads(self._peers[0].receive())
        message = pickle.dumps(piece, pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            peer.send(message)
        return piece


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderListener:
    """Rank 0's listening socket, and the ranks' shared key."""

    listening_socket: socket.socket
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """The shared key; other ranks get it from rank 0's offer."""

    @property
    def details(self) -> Mapping[str, Any]:
        """The port and the key, for rank 0's offer."""
        return {
            "collective_port": self.listening_socket.getsockname()[1],
            "collective_key": self.key,
        }


@contextmanager
def listening(host: str, ports: range | None = None) -> Iterator[LeaderListener]:
    """Listen on a free port of this address only, which is the one the other ranks connect to.

    Args:
        host: the address.
        ports: those to choose from; None for any.
    """
    with listening_socket(host, ports) as listener:
        yield LeaderListener(listening_socket=listener)


@contextmanager
def connected(
    world: World, listener: LeaderListener | None, *, within_s: float = _TOGETHER_S
) -> Iterator[Collective]:
    """Connect every rank to rank 0, whose offer has its address, and yield the collective.

    Args:
        world: all ranks.
        listener: rank 0's listener; None on the others.
        within_s: seconds for all ranks to connect.
    """
    with ExitStack() as stack:
        if listener is not None:
            key, count = bytes.fromhex(listener.key), world.size - 1
            peers = accept_ranks(listener.listening_socket, key, count, stack, within_s=within_s)
        else:
            leader, me = world.leader, world.me
            assert leader.host is not None
            address = (leader.host, leader.details["collective_port"])
            key = bytes.fromhex(leader.details["collective_key"])
            peers = [connect_to_leader(address, key, me.rank, stack, within_s=within_s)]
        yield Collective(peers, rank=world.me.rank)
