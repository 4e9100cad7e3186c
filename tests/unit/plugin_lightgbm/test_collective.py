"""The small collective beside LightGBM's: all hear the same, and who leaves is missed."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain.extension import RankConnection
from polytrain_lightgbm.collective import Collective


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
        with pytest.raises(OSError, match=r"left the collective|[Bb]roken|reset"):
            ends[1 - leaves].all_gather(1.0)


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
