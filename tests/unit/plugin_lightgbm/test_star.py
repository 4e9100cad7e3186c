"""The small collective beside LightGBM's: all hear the same, and who leaves is missed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from polytrain.common.placement import NodeAddress, members
from polytrain_lightgbm.relay import Star, center, star
from polytrain_plugins import Offer, World


@contextmanager
def stars(world_size: int) -> Iterator[list[Star]]:
    """One end of the star for each rank, over socket pairs."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(world_size - 1)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        center = Star([ours for ours, _ in pairs])
        others = enumerate((theirs for _, theirs in pairs), start=1)
        yield [center, *(Star([theirs], rank=rank) for rank, theirs in others)]


def on_every_rank(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout=30) for future in [threads.submit(c) for c in calls]]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_gets_everybodys_piece(world_size: int) -> None:
    with stars(world_size) as ranks:
        pieces = on_every_rank(
            [lambda r=r, one=one: one.gathered({"rank": r}) for r, one in enumerate(ranks)]
        )
    assert pieces == [[{"rank": rank} for rank in range(world_size)]] * world_size


def test_only_the_first_hears_and_all_are_told() -> None:
    with stars(3) as ranks:
        found = on_every_rank(
            [
                lambda r=r, one=one: (one.heard(r), one.told("all" if r == 0 else None))
                for r, one in enumerate(ranks)
            ]
        )
    assert found == [([0, 1, 2], "all"), (None, "all"), (None, "all")]


def test_a_piece_may_be_larger_than_a_socket_holds() -> None:
    large = np.arange(3_000_000)
    with stars(2) as ranks:
        pieces = on_every_rank([lambda one=one: one.gathered(large) for one in ranks])
    assert all((piece == large).all() for rank in pieces for piece in rank)


def test_exchanges_follow_one_another() -> None:
    with stars(3) as ranks:
        found = on_every_rank(
            [lambda one=one: [sum(one.gathered(n)) for n in range(50)] for one in ranks]
        )
    assert found == [[3 * n for n in range(50)]] * 3


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_leaves_is_an_error_and_no_hang(leaves: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ends = [Star([ours]), Star([theirs], rank=1)]
        (theirs if leaves else ours).close()
        with pytest.raises(OSError, match=r"left the training|[Bb]roken|reset"):
            ends[1 - leaves].gathered(1.0)


def test_ranks_find_the_center_by_its_offer_and_nobody_else_is_let_in() -> None:
    everybody = members([NodeAddress(node_id="n", host="127.0.0.1")] * 3, cpus=1, gpus=0)
    with center() as middle:
        offers = (Offer(host="127.0.0.1", details=middle.details), Offer(), Offer())
        together = threading.Barrier(3)

        def rank(number: int) -> list[int]:
            world = World(attempt=0, me=everybody[number], members=everybody, offers=offers)
            with star(world, middle if number == 0 else None) as mine:
                numbers = mine.gathered(number)
                together.wait(timeout=30)
            return numbers

        address = ("127.0.0.1", middle.details["star_port"])
        socket.create_connection(address).close()
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"\xff" * 100)
            found = on_every_rank([lambda n=n: rank(n) for n in range(3)])
        assert found == [[0, 1, 2]] * 3
