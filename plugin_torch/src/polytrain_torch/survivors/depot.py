"""Lays a rank's small states down on another host: its own may be lost with the agent on it.

Rank 0's store takes those of the ranks on other hosts, and a store on the second host those of the
ranks beside rank 0. A state is sent before the gradients that follow it, so whoever has a step's
gradients can read what the others had alone at that step. Each message carries an HMAC by a key
that is in rank 0's offer, because states are unpickled and the stores ask nobody who it is.
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

_HEADER = struct.Struct(f"<{hashlib.sha256().digest_size}sQ")
"""A message's HMAC, and its number."""

_STATE = struct.Struct("<Q?Q")
"""A state's point, whether it is a forecast, and the length of its content, which follows."""

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
        self._clean: KeptState | None = None
        """The last state that is no forecast: a forecast means nothing without it."""

        self._sent = 0
        self._forecast: bytes | None = None
        """The generators and buffers of the last forecast; None if a state has come since."""

    def put(self, state: KeptState, alone: bytes) -> None:
        """Send a state. One that the last forecast has foretold goes with the next one.

        Args:
            state: the state.
            alone: its generators and buffers.
        """
        if self._store is None or len(state.content) > _MOST_SENT:
            return
        if not state.is_forecast:
            self._clean = state
            if alone == self._forecast:
                return
        self._forecast = alone if state.is_forecast else None
        before = [self._clean] if state.is_forecast and self._clean is not None else []
        slot = self._sent % _SLOTS
        self._sent += 1
        try:
            rank = self._world.me.rank
            message = packed(self._key, rank, self._sent, (*before, state))
            self._store.set(_name(rank, slot), message)
        except RuntimeError:
            # Its host is lost, and the attempt ends.
            self._store = None

    def read(self, rank: int) -> Sequence[KeptState]:
        """Return the small states of a rank, oldest first; empty if none are there."""
        offer = store_of(rank, self._world)
        if offer is None:
            return []
        found: list[tuple[int, list[KeptState]]] = []
        with contextlib.suppress(RuntimeError):
            store = _connected(offer, _ANSWERS_WITHIN)
            for slot in range(_SLOTS):
                if store.check([_name(rank, slot)]):
                    message = unpacked(self._key, rank, store.get(_name(rank, slot)))
                    found += [] if message is None else [message]
        return [state for _, states in sorted(found, key=lambda each: each[0]) for state in states]


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


def packed(key: bytes, rank: int, number: int, states: Sequence[KeptState]) -> bytes:
    """Return a message with a rank's states."""
    pieces: list[bytes] = []
    for each in states:
        pieces += [_STATE.pack(each.point, each.is_forecast, len(each.content)), each.content]
    rest = b"".join(pieces)
    return _HEADER.pack(_tag(key, rank, number, rest), number) + rest


def unpacked(key: bytes, rank: int, message: bytes) -> tuple[int, list[KeptState]] | None:
    """Return a message's number and its states; None if it isn't what the rank has sent."""
    if len(message) < _HEADER.size:
        return None
    tag, number = _HEADER.unpack_from(message)
    rest = message[_HEADER.size :]
    if not hmac.compare_digest(tag, _tag(key, rank, number, rest)):
        return None
    states, at = [], 0
    while at < len(rest):
        point, is_forecast, length = _STATE.unpack_from(rest, at)
        at += _STATE.size
        content = rest[at : at + length]
        states.append(KeptState(point=point, is_forecast=is_forecast, content=content))
        at += length
    return number, states


def _tag(key: bytes, rank: int, number: int, rest: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<QQ", rank, number) + rest, "sha256")


def _connected(offer: Offer, timeout: timedelta) -> TCPStore:
    assert offer.host is not None
    assert offer.port is not None
    return TCPStore(offer.host, offer.port, is_master=False, timeout=timeout)


def _name(rank: int, slot: int) -> str:
    return f"kept {rank} {slot}"
