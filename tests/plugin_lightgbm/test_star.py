"""The small collective beside LightGBM's: one sum, the same on every rank to the last bit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from polytrain.workers.placement import Place, members
from polytrain_lightgbm.star import Star, star
from polytrain_plugins import Offer, World


@contextmanager
def stars(world_size: int) -> Iterator[list[Star]]:
    """One end of the star for each rank, over socket pairs."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(world_size - 1)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        center = Star([ours for ours, _ in pairs], is_center=True)
        yield [center, *(Star([theirs], is_center=False) for _, theirs in pairs)]


def on_every_rank(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout=30) for future in [threads.submit(c) for c in calls]]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_gets_the_sum(world_size: int) -> None:
    with stars(world_size) as ranks:
        sums = on_every_rank(
            [lambda r=r, one=one: one.sum([1.0, float(r), -0.5]) for r, one in enumerate(ranks)]
        )
    total = [world_size, sum(range(world_size)), -0.5 * world_size]
    assert sums == [total] * world_size


def test_the_sum_is_the_same_to_the_last_bit() -> None:
    """Addition of floats depends on its order: one rank adds, and all others take its word."""
    values = [0.1, 1e16, -1e16, 0.3]
    with stars(4) as ranks:
        sums = on_every_rank(
            [lambda one=one, v=v: one.sum([v]) for one, v in zip(ranks, values, strict=True)]
        )
    assert len({one.hex() for [one] in sums}) == 1


def test_sums_follow_one_another() -> None:
    with stars(3) as ranks:
        sums = on_every_rank(
            [lambda one=one: [one.sum([float(n)])[0] for n in range(50)] for one in ranks]
        )
    assert sums == [[3.0 * n for n in range(50)]] * 3


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_leaves_is_an_error_and_no_hang(leaves: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ends = [Star([ours], is_center=True), Star([theirs], is_center=False)]
        (theirs if leaves else ours).close()
        with pytest.raises(OSError, match=r"left the training|[Bb]roken|reset"):
            ends[1 - leaves].sum([1.0])


def test_ranks_find_the_center_by_its_offer() -> None:
    everybody = members([Place(node_id="n", host="127.0.0.1")] * 3, cpus=1, gpus=0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        offers = (Offer(host="127.0.0.1", details={"star_port": port}), Offer(), Offer())
        together = threading.Barrier(3)

        def rank(number: int) -> list[float]:
            world = World(generation=0, me=everybody[number], members=everybody, offers=offers)
            with star(world, listener if number == 0 else None) as mine:
                total = mine.sum([float(number)])
                together.wait(timeout=30)
            return total

        assert on_every_rank([lambda n=n: rank(n) for n in range(3)]) == [[3.0]] * 3
