"""Lays a rank's small states down on another host: its own may be lost with the agent on it.

Rank 0's store takes those of the ranks on other hosts, and a store on the second host those of the
ranks beside rank 0. A state is sent before the gradients that follow it, so whoever has a step's
gradients can read what the others had alone at that step. Each message carries an HMAC by a key
that is in rank 0's offer, because states are unpickled and the stores ask nobody who it is.

A state goes in pieces. NumPy's and Python's random numbers seldom change, and are sent apart when
they do; a forecast lacks what the state before it has. What is hashed and sent at each step is then
half of two states, or less.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore

from polytrain.extension import KeptState
from polytrain_plugins import Member, Offer, World, listening_socket

logger = logging.getLogger(__name__)

_SLOTS = 4
"""Number of the last messages of a rank that are kept."""

_MOST_SENT = 1 << 20
"""Bytes of a state that may be sent at each step."""

_KEY = "kept_key"
"""Name of the key in rank 0's offer."""

_TAG_BYTES = hashlib.sha256().digest_size
"""Length of the HMAC that begins a message."""

_HEADER = struct.Struct("<QQ")
"""A message's number, and that of the message with pieces that it lacks; 0 for none."""

_STATE = struct.Struct("<Q?Q")
"""A state's point, whether it is a forecast, and the number of its pieces, which follow."""

_LENGTH = struct.Struct("<q")
"""A piece's length, before the piece."""

_KNOWN = _LENGTH.pack(-1)
"""Stands for a piece that the state before has, or the first state's base."""

_SELDOM = slice(2, 4)
"""The pieces that seldom change: the random numbers of NumPy and Python."""

Pieces = Sequence[bytes]
State = tuple[int, bool, Pieces]
"""A state's point, whether it is a forecast, and its content."""

_ANSWERS_WITHIN = timedelta(seconds=0.5)
"""The host of a store may be the one that is lost."""


def serves_second(me: Member) -> bool:
    """Return whether this rank serves the store for the ranks on rank 0's host."""
    return me.node_rank == 1 and me.local_rank == 0 and not me.gpus


def second_store(me: Member, timeout: timedelta) -> tuple[TCPStore, int] | None:
    """Return the second host's store and its port; None if no port is free."""
    try:
        listener = listening_socket(me.listen_host, me.ports)
    except OSError as error:
        logger.warning("What ranks have alone may be lost with the first host: %s", error)
        return None
    port = listener.getsockname()[1]
    store = TCPStore(
        me.listen_host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        # The store closes the listener.
        master_listen_fd=listener.detach(),
    )
    return store, port


def store_of(rank: int, world: World) -> Offer | None:
    """Return the offer of the store that takes a rank's states; None if no other host has one."""
    if world.members[rank].node_rank != 0:
        return world.leader
    for member, offer in zip(world.members, world.offers, strict=True):
        if serves_second(member) and offer.port is not None:
            return offer
    return None


class Depot:
    """One rank's connection to the stores. A thread may read while another one sends."""

    def __init__(self, world: World, timeout: timedelta) -> None:
        """
        Args:
            world: the ranks of the attempt.
            timeout: maximum time to connect.

        Raises:
            RuntimeError: the store doesn't answer.
        """
        self._world = world
        offer = store_of(world.me.rank, world)
        self._store = None if offer is None else _connected(offer, timeout)
        self._key = bytes.fromhex(world.leader.details[_KEY])
        self._clean: State | None = None
        """The last state that is no forecast: a forecast means nothing without it."""

        self._sent = 0
        self._seldom: Pieces = []
        self._seldom_sent = 0
        """The number of the message with them; 0 for none."""

        self._forecast: Pieces | None = None
        """The generators and buffers of the last forecast; None if a state has come since."""

    def put(self, point: int, pieces: Pieces, *, is_forecast: bool, alone: Pieces) -> None:
        """Send a state. One that the last forecast has foretold goes with the next one.

        Args:
            point: the state's point.
            pieces: its content. The pieces of all states have the same order.
            is_forecast: whether it is a forecast.
            alone: its generators and buffers.
        """
        if self._store is None or sum(map(len, pieces)) > _MOST_SENT:
            return
        state = point, is_forecast, pieces
        if not is_forecast:
            self._clean = state
            if alone == self._forecast:
                return
        self._forecast = alone if is_forecast else None
        before = [self._clean] if is_forecast and self._clean is not None else []
        try:
            if pieces[_SELDOM] != self._seldom[_SELDOM]:
                self._seldom = [*[b""] * _SELDOM.start, *pieces[_SELDOM]]
                self._seldom_sent += 1
                only = [(point, is_forecast, self._seldom)]
                self._send("seldom", self._seldom_sent, only)
            self._sent += 1
            self._send("kept", self._sent, [*before, state], self._seldom_sent, self._seldom)
        except RuntimeError:
            # Its host is lost, and the attempt ends.
            self._store = None

    def _send(
        self, kind: str, number: int, states: Sequence[State], base: int = 0, known: Pieces = ()
    ) -> None:
        assert self._store is not None
        name = _name(kind, self._world.me.rank, number % _SLOTS)
        self._store.set(name, packed(self._key, name, number, states, base=base, known=known))

    def read(self, rank: int) -> Sequence[KeptState]:
        """Return the small states of a rank, oldest first; empty if none are there."""
        offer = store_of(rank, self._world)
        if offer is None:
            return []
        found: dict[int, Sequence[State]] = {}
        with contextlib.suppress(RuntimeError):
            store = _connected(offer, _ANSWERS_WITHIN)
            seldom = self._messages(store, "seldom", rank, {0: ()})
            known = {number: pieces for number, [(_, _, pieces)] in seldom.items()}
            found = self._messages(store, "kept", rank, {0: (), **known})
        return [
            KeptState(point=point, is_forecast=is_forecast, content=b"".join(pieces))
            for _, states in sorted(found.items())
            for point, is_forecast, pieces in states
        ]

    def _messages(
        self, store: TCPStore, kind: str, rank: int, bases: Mapping[int, Pieces]
    ) -> dict[int, Sequence[State]]:
        found: dict[int, Sequence[State]] = {}
        for name in (_name(kind, rank, slot) for slot in range(_SLOTS)):
            if store.check([name]):
                message = unpacked(self._key, name, store.get(name), bases)
                found.update([] if message is None else [message])
        return found


_current: Depot | None = None


@contextmanager
def depositing(world: World, timeout: timedelta) -> Iterator[None]:
    """Lay down small states on another host in a block of code, if there is another one."""
    global _current
    me = world.me
    if me.node_count > 1 and not me.gpus:
        _current = Depot(world, timeout)
    try:
        yield
    finally:
        _current = None


def depot() -> Depot | None:
    """Return the attempt's depot; None if all ranks are on one host."""
    return _current


def key_details() -> Mapping[str, str]:
    """Return a new key, for the details of rank 0's offer."""
    return {_KEY: secrets.token_hex(32)}


def packed(
    key: bytes,
    name: str,
    number: int,
    states: Sequence[State],
    *,
    base: int = 0,
    known: Pieces = (),
) -> bytes:
    """Return a message with a rank's states, for the name under which it is stored.

    Args:
        number: the message's number.
        base: the number of the message with the known pieces; 0 for none.
        known: pieces that needn't be sent, at their place in the first state.
    """
    rest: list[bytes] = []
    for point, is_forecast, pieces in states:
        rest.append(_STATE.pack(point, is_forecast, len(pieces)))
        for place, piece in enumerate(pieces):
            is_known = place < len(known) and piece == known[place]
            rest += [_KNOWN] if is_known else [_LENGTH.pack(len(piece)), piece]
        known = pieces
    tagged = b"".join([_HEADER.pack(number, base), *rest])
    return _tag(key, name, tagged) + tagged


def unpacked(
    key: bytes, name: str, message: bytes, bases: Mapping[int, Pieces]
) -> tuple[int, Sequence[State]] | None:
    """Return a message's number and its states; None if it isn't what the rank has sent.

    Args:
        name: the name under which the message is stored.
        bases: known pieces, by the number of their message. Without its own, it isn't read either.
    """
    tag, tagged = message[:_TAG_BYTES], message[_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, name, tagged)):
        return None
    number, base = _HEADER.unpack_from(tagged)
    if base not in bases:
        return None
    states: list[State] = []
    known, at = bases[base], _HEADER.size
    while at < len(tagged):
        point, is_forecast, count = _STATE.unpack_from(tagged, at)
        at += _STATE.size
        pieces: list[bytes] = []
        for place in range(count):
            [length] = _LENGTH.unpack_from(tagged, at)
            at += _LENGTH.size
            pieces.append(known[place] if length < 0 else tagged[at : at + length])
            at += max(length, 0)
        states.append((point, is_forecast, pieces))
        known = pieces
    return number, states


def _tag(key: bytes, name: str, tagged: bytes) -> bytes:
    return hmac.digest(key, name.encode() + b" " + tagged, "sha256")


def _connected(offer: Offer, timeout: timedelta) -> TCPStore:
    assert offer.host is not None
    assert offer.port is not None
    return TCPStore(offer.host, offer.port, is_master=False, timeout=timeout)


def _name(kind: str, rank: int, slot: int) -> str:
    return f"{kind} {rank} {slot}"
