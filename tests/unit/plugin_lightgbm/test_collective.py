"""The small collective beside LightGBM's: all hear the same, and who leaves is missed."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain.policy.placement import NodeAddress, members
from polytrain_lightgbm.collective import Collective, LeaderListener, connected, listening
from polytrain_lightgbm.connections import RankConnection
from polytrain_plugins import Offer, World


@contextmanager
def connected_ranks(world_size: int) -> Iterator[list[Collective]]:
    """The collective of each rank, over socket pairs."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(world_size - 1)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        first = Collective([RankConnection(ours) for ours, _ in pairs])
        others = enumerate((theirs for _, theirs in pairs), start=1)
        yield [
            first,
            *(Collective([RankConnection(theirs)], rank=rank) for rank, theirs in others),
        ]


def on_every_rank(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout=30) for future in [threads.submit(c) for c in calls]]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_gets_every_piece(world_size: int) -> None:
    with connected_ranks(world_size) as ranks:
        pieces = on_every_rank(
            [lambda r=r, one=one: one.all_gather({"rank": r}) for r, one in enumerate(ranks)]
        )
    assert pieces == [[{"rank": rank} for rank in range(world_size)]] * world_size


def test_rank_0_gathers_and_all_get_its_broadcast() -> None:
    with connected_ranks(3) as ranks:
        found = on_every_rank(
            [
                lambda r=r, one=one: (one.gather(r), one.broadcast("all" if r == 0 else None))
                for r, one in enumerate(ranks)
            ]
        )
    assert found == [([0, 1, 2], "all"), (None, "all"), (None, "all")]


def test_a_piece_may_be_larger_than_a_socket_holds() -> None:
    large = np.arange(3_000_000)
    with connected_ranks(2) as ranks:
        pieces = on_every_rank([lambda one=one: one.all_gather(large) for one in ranks])
    assert all((piece == large).all() for rank in pieces for piece in rank)


def test_exchanges_follow_one_another() -> None:
    with connected_ranks(3) as ranks:
        found = on_every_rank(
            [lambda one=one: [sum(one.all_gather(n)) for n in range(50)] for one in ranks]
        )
    assert found == [[3 * n for n in range(50)]] * 3


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_leaves_is_an_error_and_no_hang(leaves: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ends = [Collective([RankConnection(ours)]), Collective([RankConnection(theirs)], rank=1)]
        (theirs if leaves else ours).close()
        with pytest.raises(OSError, match=r"left the training|[Bb]roken|reset"):
            ends[1 - leaves].all_gather(1.0)


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
    with listening("127.0.0.1") as waiting:
        yield waiting


def meet(
    listener: LeaderListener, before_the_last: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """All three ranks connect; what they have gathered then."""
    together = threading.Barrier(3)

    def rank(number: int) -> list[int]:
        if number == 2:
            before_the_last()
        with connected(world_of(listener, number), listener if number == 0 else None) as mine:
            numbers = mine.all_gather(number)
            together.wait(timeout=30)
        return numbers

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
        assert meet(listener) == [[0, 1, 2]] * 3


def test_more_strangers_than_may_wait(listener: LeaderListener) -> None:
    with ExitStack() as stack:

        def come() -> None:
            for _ in range(300):
                stack.enter_context(socket.create_connection(address_of(listener)))

        assert meet(listener, before_the_last=come) == [[0, 1, 2]] * 3


def test_missing_ranks_are_named(listener: LeaderListener) -> None:
    with (
        pytest.raises(TimeoutError, match=r"rank 1, rank 2 of LightGBM.* within 0\.05 s"),
        connected(world_of(listener, 0), listener, within_s=0.05),
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
        with pytest.raises(ConnectionError) as error, connected(world_of(listener, 1), None):
            pass
        return str(error.value)

    received, message = on_every_rank([pretend, rank])
    assert "isn't rank 0 of this run" in message
    assert listener.key.encode() not in received
    assert bytes.fromhex(listener.key) not in received


@pytest.mark.parametrize("forgery", ["another's", "again", "back"])
def test_what_a_rank_has_not_sent_is_not_unpickled(forgery: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        there = Collective([RankConnection(theirs, b"key", is_leader=True)])
        if forgery == "another's":
            RankConnection(ours, b"another key").send(pickle.dumps(Bomb(mark)))
        elif forgery == "again":
            RankConnection(ours, b"key").send(pickle.dumps(None))
            assert there.gather(0) == [0, None]
            # A recorded message, whose proof is right.
            RankConnection(ours, b"key").send(pickle.dumps(Bomb(mark)))
        else:
            RankConnection(ours, b"key", is_leader=True).send(pickle.dumps(Bomb(mark)))
        with pytest.raises(ConnectionError, match="isn't what a worker"):
            there.gather(0)
    assert not mark.exists()


class Bomb:
    """Makes a directory, wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)
