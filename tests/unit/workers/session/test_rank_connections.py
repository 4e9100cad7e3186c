"""Connections between ranks: strangers block nobody, and ranks that are missing are named."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from polytrain.extension import LeaderListener, connected_ranks, leader_listener
from polytrain.policy.placement import NodeAddress, members
from polytrain_plugins import Offer, World


def on_every_rank(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout=30) for future in [threads.submit(c) for c in calls]]


EVERYBODY = members([NodeAddress(node_id="n", host="127.0.0.1")] * 3, cpus=1, gpus=0)


def world_of(leader: LeaderListener, rank: int, **changes: Any) -> World:
    details = {**leader.details, **changes}
    offers = (Offer(host="127.0.0.1", details=details), Offer(), Offer())
    return World(attempt=0, me=EVERYBODY[rank], members=EVERYBODY, offers=offers)


def address_of(leader: LeaderListener) -> tuple[str, int]:
    return "127.0.0.1", leader.details["collective_port"]


@pytest.fixture
def listener() -> Iterator[LeaderListener]:
    """Rank 0 of three, waiting for the others."""
    with leader_listener("127.0.0.1") as waiting:
        yield waiting


def meet(
    listener: LeaderListener, before_the_last: Callable[[], None] = lambda: None
) -> list[list[bytes]]:
    """All three ranks connect; whom each hears then: rank 0 the others, and these rank 0."""

    def rank(number: int) -> list[bytes]:
        if number == 2:
            before_the_last()
        with connected_ranks(world_of(listener, number), listener if number == 0 else None) as mine:
            for peer in mine:
                peer.send(b"%d" % number)
            return [peer.receive() for peer in mine]

    return on_every_rank([lambda n=n: rank(n) for n in range(3)])


def test_it_listens_at_the_offered_address_only(listener: LeaderListener) -> None:
    assert listener.listening_socket.getsockname()[0] == "127.0.0.1"


def test_strangers_are_refused_and_block_nobody(listener: LeaderListener) -> None:
    """Some are silent, some say too little or something else, some have gone again."""
    with ExitStack() as stack:
        # Had the silent ones to be waited for one after another, it would take minutes.
        said = (
            *[b""] * 30,
            b"\x00",
            b"\xff" * 100,
            struct.pack("<Q", 10) + b"\xff" * 10,
            b"0" * 52,
        )
        for words in said:
            stranger = stack.enter_context(socket.create_connection(address_of(listener)))
            stranger.sendall(words)
        socket.create_connection(address_of(listener)).close()
        assert meet(listener) == [[b"1", b"2"], [b"0"], [b"0"]]


def test_more_strangers_than_may_wait(listener: LeaderListener) -> None:
    with ExitStack() as stack:

        def come() -> None:
            for _ in range(300):
                stack.enter_context(socket.create_connection(address_of(listener)))

        assert meet(listener, before_the_last=come) == [[b"1", b"2"], [b"0"], [b"0"]]


def test_missing_ranks_are_named(listener: LeaderListener) -> None:
    with (
        pytest.raises(
            TimeoutError, match=r"rank 1, rank 2 haven't connected to rank 0 within 0\.05 s"
        ),
        connected_ranks(world_of(listener, 0), listener, within_s=0.05),
    ):
        pass


def test_a_listener_without_the_key_is_refused_and_does_not_get_it(
    listener: LeaderListener,
) -> None:
    """Somebody who took the port of a rank 0 that is gone, and answers with what was received."""

    def pretend() -> bytes:
        connection, _ = listener.listening_socket.accept()
        with connection:
            connection.sendall(bytes(16))
            received = connection.recv(4096)
            connection.sendall(received[-32:])
            return received

    def rank() -> str:
        with pytest.raises(ConnectionError) as error, connected_ranks(world_of(listener, 1), None):
            pass
        return str(error.value)

    received, message = on_every_rank([pretend, rank])
    assert "isn't rank 0 of this run" in message
    assert listener.key.encode() not in received
    assert bytes.fromhex(listener.key) not in received


def test_an_offer_of_another_kind_is_named() -> None:
    """As of an engine that doesn't pass on the collective's offer."""
    everybody = members([NodeAddress(node_id="n", host="127.0.0.1")] * 2, cpus=1, gpus=0)
    offers = (Offer(host="127.0.0.1", port=9), Offer())
    world = World(attempt=0, me=everybody[1], members=everybody, offers=offers)
    with (
        pytest.raises(ValueError, match="offering` must yield the offer of the collective's"),
        connected_ranks(world, None),
    ):
        pass
