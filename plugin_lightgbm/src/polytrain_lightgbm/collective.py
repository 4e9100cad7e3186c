"""A small collective between ranks, since LightGBM's Python package doesn't expose its own.

All ranks are connected to rank 0, which gathers and broadcasts objects. This suffices to agree on
bins before training, and on metrics and early stopping in a round. Objects are pickled, so only
authenticated ranks may send them (`RankConnection`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polytrain.extension import LeaderListener, RankConnection, connected_ranks
from polytrain_plugins import World


class Collective:
    """The ranks of one attempt, connected to rank 0."""

    def __init__(self, peers: Sequence[RankConnection], *, rank: int = 0) -> None:
        """
        Args:
            peers: on rank 0, the connections to the others, by rank; elsewhere, that to rank 0.
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


@contextmanager
def connected(world: World, listener: LeaderListener | None) -> Iterator[Collective]:
    """Connect every rank to rank 0, whose offer has its address, and yield the collective.

    Args:
        world: all ranks.
        listener: rank 0's listener; None on the others.
    """
    with connected_ranks(world, listener) as peers:
        yield Collective(peers, rank=world.me.rank)
