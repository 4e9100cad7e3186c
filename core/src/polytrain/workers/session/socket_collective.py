"""A collective over TCP, for backends whose library has none of its own.

All ranks are connected to rank 0, which combines what they send and answers all of them. Rank 0
therefore sends and receives each array once for every other rank. The order of additions depends on
the ranks alone, so that sums are the same to the last bit each time.
"""

from __future__ import annotations

import contextlib
import selectors
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from polytrain.workers.session.rank_connections import (
    LeaderListener,
    RankConnection,
    connected_ranks,
    leader_listener,
)
from polytrain_plugins import Member, Offer, World

MODULES = frozenset({RankConnection.__module__, __name__})
"""The modules that raise when a connection of this collective breaks."""

Array = np.ndarray[Any, Any]

_PART_BYTES = 1 << 20
"""Arrays are added in parts of this size, so rank 0 needs little memory for each other rank."""

_LENGTH = struct.Struct("<Q")

_DONE, _DIFFERENT, _LOST = b"=", b"!", b"?"
"""How an answer of rank 0 begins: what follows is the result, or an error's text."""


class SocketCollective:
    """The ranks of one attempt. An engine makes one, and passes `offering` and `joined` on to it.

    Between the two it can't be used. Every rank makes the same calls in the same order, from one
    thread at a time. After an error the collective can't be used any more.

    All calls raise:
        ConnectionError: a rank has ended, or its connection is broken; the message names it.
        RuntimeError: another rank makes another call; the message names both.
    """

    def __init__(self) -> None:
        self._listener: LeaderListener | None = None
        self._peers: Sequence[RankConnection] | None = None
        self._selector: selectors.BaseSelector | None = None
        self._rank = 0
        self._closed = "it is used outside of `with collective.joined(world):`"

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        """Listen on rank 0, and yield the offer with which `joined` finds it.

        A backend says so in its demand: `Demand(leader_ports=1)`.

        Args:
            me: this rank.
        """
        if me.rank != 0 or me.world_size == 1:
            yield Offer()
            return
        # It listens from now on, so the port is never free in between.
        with leader_listener(me.listen_host, me.ports) as self._listener:
            yield Offer(host=me.listen_host, details=self._listener.details)

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        """Connect all ranks, and close the connections in the end.

        Args:
            world: the attempt; rank 0's offer is that of `offering`.

        Raises:
            TimeoutError: ranks haven't connected within five minutes; the message names them.
        """
        with ExitStack() as stack:
            self._rank, self._peers = world.me.rank, ()
            stack.callback(self._close, self._closed)
            if world.size > 1:
                self._peers = stack.enter_context(connected_ranks(world, self._listener))
                self._selector = stack.enter_context(selectors.DefaultSelector())
                for number, peer in enumerate(self._peers, start=1):
                    self._selector.register(peer, selectors.EVENT_READ, number)
            yield

    def sum(self, array: Array) -> Array:
        """Return the sum of all ranks' arrays, the same on every rank.

        Args:
            array: numbers (integers, floats or complex ones); the same type and shape on every
                rank. Integers overflow as in NumPy.

        Raises:
            TypeError: the array doesn't hold numbers.
        """
        array = np.asarray(array)
        if array.dtype.kind not in "iufc":
            raise TypeError(
                f"an array of type {array.dtype} can't be added up. Convert it to numbers first, "
                "such as array.astype(float)"
            )
        call = f"sum of {array.dtype}, shape {array.shape}"
        flat = np.ascontiguousarray(array).reshape(-1)
        summed = np.empty_like(flat)
        step = _PART_BYTES // flat.itemsize
        # An empty array is one empty part: its rank waits for the others, too.
        for start in range(0, max(1, flat.size), step):
            part = flat[start : start + step]
            added = self._exchange(call, part.tobytes(), lambda parts: _sum(parts, flat.dtype))
            summed[start : start + step] = np.frombuffer(added, flat.dtype)
        return summed.reshape(array.shape)

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank.

        Args:
            data: rank 0's bytes. Those of other ranks are ignored.
        """
        return self._exchange("broadcast", b"", lambda pieces: data)

    def all_gather(self, piece: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank.

        Args:
            piece: this rank's bytes; every rank's may have another length.
        """
        rest = memoryview(self._exchange("all_gather", piece, _joined))
        pieces = []
        while rest:
            [length] = _LENGTH.unpack_from(rest)
            end = _LENGTH.size + length
            pieces.append(bytes(rest[_LENGTH.size : end]))
            rest = rest[end:]
        return pieces

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._exchange("barrier", b"", lambda pieces: b"")

    def _exchange(
        self, call: str, piece: bytes, combine: Callable[[Sequence[bytes]], bytes]
    ) -> bytes:
        """Send a piece to rank 0, and return what it has combined of all.

        Args:
            call: what the ranks must agree on.
            piece: this rank's.
            combine: what rank 0 makes of all pieces, by rank.
        """
        if self._peers is None:
            raise ConnectionError(f"the collective is closed: {self._closed}")
        try:
            if self._rank == 0:
                return self._combined(self._peers, call, piece, combine)
            return _answer(self._peers[0], call, piece)
        except BaseException as error:
            # The ranks' messages don't match any more.
            self._close(f"an earlier call has failed: {error}")
            raise

    def _combined(
        self,
        peers: Sequence[RankConnection],
        call: str,
        piece: bytes,
        combine: Callable[[Sequence[bytes]], bytes],
    ) -> bytes:
        """Combine all ranks' pieces, on rank 0, and answer all."""
        try:
            found = {0: (call, piece), **self._received(peers)}
            _expect_same([found[rank][0] for rank in range(len(found))])
            combined = combine([found[rank][1] for rank in range(len(found))])
            for rank, peer in enumerate(peers, start=1):
                with _naming(rank):
                    peer.send(_DONE + combined)
            return combined
        except ConnectionError as error:
            _tell(peers, _LOST, str(error))
            raise
        except RuntimeError as error:
            _tell(peers, _DIFFERENT, str(error))
            raise
        except BaseException as error:
            _tell(peers, _LOST, f"rank 0 has left the collective: {error!r}")
            raise

    def _received(self, peers: Sequence[RankConnection]) -> dict[int, tuple[str, bytes]]:
        """Return the call and the piece of every rank but this one.

        Reads whichever rank has sent something, and so notices at once if another has ended.
        """
        found: dict[int, tuple[str, bytes]] = {}
        while len(found) < len(peers):
            assert self._selector is not None
            for ready, _ in self._selector.select():
                with _naming(ready.data):
                    # A rank that has made its call sends nothing more: it has ended.
                    found[ready.data] = _unpacked(peers[ready.data - 1].receive())
        return found

    def _close(self, reason: str) -> None:
        for peer in self._peers or ():
            peer.close_for_sending()
        self._peers, self._closed = None, reason


def _answer(leader: RankConnection, call: str, piece: bytes) -> bytes:
    """Send a rank's call to rank 0, and return its answer."""
    with _naming(0):
        # If it has closed the connection, it may have said why before.
        with contextlib.suppress(OSError):
            leader.send(_packed(call, piece))
        answer = leader.receive()
    if answer[:1] == _DONE:
        return answer[1:]
    error = RuntimeError if answer[:1] == _DIFFERENT else ConnectionError
    raise error(answer[1:].decode())


def _tell(peers: Sequence[RankConnection], kind: bytes, text: str) -> None:
    """Send the reason of an error to all ranks that can still be reached."""
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.send(kind + text.encode())


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Name the rank in errors of its connection."""
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"rank {rank} has left the collective: {error}") from error


def _expect_same(calls: Sequence[str]) -> None:
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise RuntimeError(
                f"rank 0 calls {calls[0]}, and rank {rank} calls {call}: all ranks must make the "
                "same calls, in the same order, with arrays of the same type and shape"
            )


def _packed(call: str, piece: bytes) -> bytes:
    name = call.encode()
    return _LENGTH.pack(len(name)) + name + piece


def _unpacked(message: bytes) -> tuple[str, bytes]:
    [length] = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    return message[_LENGTH.size : end].decode(), message[end:]


def _sum(parts: Sequence[bytes], dtype: np.dtype[Any]) -> bytes:
    """Add arrays in the order of the ranks."""
    total = np.frombuffer(parts[0], dtype).copy()
    for part in parts[1:]:
        total += np.frombuffer(part, dtype)
    return total.tobytes()


def _joined(pieces: Sequence[bytes]) -> bytes:
    return b"".join(part for piece in pieces for part in (_LENGTH.pack(len(piece)), piece))
