"""Sums in shared memory, of ranks that are threads here."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import starmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytrain_torch.collectives.shared_sums import SharedSums, size_for

Rank = Callable[[SharedSums, int], Any]


def play(world_size: int, rank: Rank, *, timeout_s: float = 60.0) -> list[Any]:
    """What every rank's function returns."""
    memory = mmap.mmap(-1, size_for(world_size))
    sums = [
        SharedSums(memory, rank=number, world_size=world_size, timeout_s=timeout_s)
        for number in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as threads:
        futures = [threads.submit(rank, each, number) for number, each in enumerate(sums)]
    return [future.result() for future in futures]


def run(operation: Iterator[float]) -> None:
    """To its end."""
    deque(operation, maxlen=0)


DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
LENGTHS = st.one_of(st.integers(0, 9), st.integers(130_000, 600_000))
"""A slot holds 131,072 numbers of double precision, 524,288 of half."""


@settings(deadline=None, max_examples=40)
@given(
    world_size=st.integers(2, 4),
    calls=st.lists(
        st.tuples(st.sampled_from(DTYPES), LENGTHS, st.sampled_from([None, 0, 1])), max_size=4
    ),
)
def test_all_ranks_have_the_sum_in_the_order_of_ranks(
    world_size: int, calls: list[tuple[torch.dtype, int, int | None]]
) -> None:
    def tensor(rank: int, number: int) -> torch.Tensor:
        dtype, length, _ = calls[number]
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(length, generator=generator).to(dtype)

    def take_part(sums: SharedSums, rank: int) -> list[torch.Tensor]:
        results = []
        for number, (*_, source) in enumerate(calls):
            mine = tensor(rank, number)
            if source is None:
                run(sums.add_up([mine]))
            else:
                run(sums.send(mine, source=source))
            results.append(mine)
        return results

    expected = [
        reduce(torch.add, [tensor(rank, number) for rank in range(world_size)])
        if source is None
        else tensor(source, number)
        for number, (*_, source) in enumerate(calls)
    ]
    for results in play(world_size, take_part):
        assert all(starmap(torch.equal, zip(results, expected, strict=True)))


def test_shapes_and_whole_numbers_are_sent() -> None:
    def take_part(sums: SharedSums, rank: int) -> list[torch.Tensor]:
        tensors = [torch.full((2, 3), rank + 1), torch.tensor(rank == 1)]
        for tensor in tensors:
            run(sums.send(tensor, source=1))
        return tensors

    for whole, boolean in play(2, take_part):
        assert whole.tolist() == [[2] * 3] * 2
        assert boolean.item() is True


def test_whoever_waits_rests() -> None:
    """Hangs are told from work by the time on a CPU."""

    def take_part(sums: SharedSums, rank: int) -> float:
        if rank == 1:
            time.sleep(2)
        begun = time.thread_time()
        run(sums.add_up([torch.ones(1)]))
        return time.thread_time() - begun

    waited, _ = play(2, take_part)
    assert waited < 0.02


@pytest.mark.parametrize("size", [0, 1])
def test_ranks_that_give_other_sizes_are_reported(size: int) -> None:
    def take_part(sums: SharedSums, rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            run(sums.add_up([torch.ones(2 if rank else size)]))
        return str(caught.value)

    first, second = play(2, take_part)
    own = f"a tensor of {4 * size} bytes"
    assert f"rank 0 has {own} where rank 1 has a tensor of 8 bytes" in first
    assert f"rank 1 has a tensor of 8 bytes where rank 0 has {own}" in second


@settings(deadline=None, max_examples=40)
@given(
    rounds=st.integers(2, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.booleans(), min_size=ranks, max_size=ranks), min_size=1, max_size=9
        )
    ),
    sums_between=st.booleans(),
)
def test_all_ranks_learn_whether_any_votes_for_it(
    rounds: list[list[bool]], sums_between: bool
) -> None:
    def take_part(sums: SharedSums, rank: int) -> list[bool]:
        held: list[bool] = []
        for votes in rounds:
            run(sums.vote(votes[rank], held))
            if sums_between:
                run(sums.add_up([torch.ones(3)]))
        return held

    expected = [any(votes) for votes in rounds]
    assert play(len(rounds[0]), take_part) == [expected] * len(rounds[0])


def test_a_rank_that_votes_where_another_adds_up_is_reported() -> None:
    def take_part(sums: SharedSums, rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            run(sums.add_up([torch.ones(1)]) if rank else sums.vote(True, []))
        return str(caught.value)

    first, second = play(2, take_part)
    assert "rank 0 has a vote on whether to stop where rank 1 has a tensor of 4 bytes" in first
    assert "rank 1 has a tensor of 4 bytes where rank 0 has a vote on whether to stop" in second


def test_a_rank_that_does_not_come_is_named() -> None:
    def take_part(sums: SharedSums, rank: int) -> None:
        if rank == 0:
            run(sums.add_up([torch.ones(1)]))

    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for rank 1.*same number.*timeout_s"):
        play(2, take_part, timeout_s=0.3)
