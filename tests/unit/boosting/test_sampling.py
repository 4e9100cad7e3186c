"""Ranks number their rows, and come to one sample of them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.boosting.stumps import Stumps

from polytrain.boosting.sampling import RowNumbers, agreed_numbers, agreed_sample

Gather = Callable[[Any], list[Any]]
Rows = list[dict[str, Any]]


def on_ranks(work: Callable[[int, Gather], Any], size: int) -> list[Any]:
    """What every rank comes to, each on a thread of its own."""
    pieces: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=30)

    def on(rank: int) -> Any:
        def gather(piece: Any) -> list[Any]:
            pieces[rank] = piece
            barrier.wait()
            everybodys = list(pieces)
            barrier.wait()
            return everybodys

        return work(rank, gather)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on, range(size)))


def test_rows_and_queries_are_numbered_one_rank_after_another() -> None:
    counts = [(5, 2), (0, 0), (3, 1)]

    def numbers(rank: int, gather: Gather) -> RowNumbers:
        rows, queries = counts[rank]
        return agreed_numbers(rows=rows, queries=queries, rank=rank, gather=gather)

    found = [(each.first_row, each.first_query) for each in on_ranks(numbers, 3)]
    assert found == [(0, 0), (5, 2), (5, 2)]
    assert {each.total_rows for each in on_ranks(numbers, 3)} == {8}


def samples(parts: Sequence[pa.Table], options: Stumps) -> list[Rows]:
    def sample(rank: int, gather: Gather) -> Rows:
        mine = parts[rank]
        numbers = agreed_numbers(rows=len(mine), queries=0, rank=rank, gather=gather)
        rows: Rows = agreed_sample(mine, numbers, options, gather=gather).to_pylist()
        return rows

    return on_ranks(sample, len(parts))


@pytest.mark.parametrize("size", [10, 1000])
def test_the_sample_is_the_same_however_the_rows_are_split(size: int) -> None:
    table = pa.table({"x": [(7 * i) % 100 for i in range(100)], "y": [1.0, 2.0] * 50})
    options = Stumps(label="y", bin_sample_rows=size)
    [alone] = samples([table], options)
    assert len(alone) == min(size, 100)
    for cuts in ([0, 40, 100], [0, 1, 1, 100]):
        parts = [table.slice(a, b - a) for a, b in pairwise(cuts)]
        assert samples(parts, options) == [alone] * len(parts)


def test_the_order_of_rows_makes_no_difference_where_all_are_taken() -> None:
    table = pa.table({"x": [3, 1, 2], "y": [0.0, 1.0, 2.0]})
    options = Stumps(label="y")
    assert samples([table], options) == samples([table.take(pa.array([2, 0, 1]))], options)
