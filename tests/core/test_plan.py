"""Which rows belong to which rank, and in how many batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polytrain.data.plan import PieceRows, batch_rows, pieces_of, rank_rows

num_rows = st.one_of(st.integers(0, 200), st.integers(0, 10**12))
world_size = st.integers(1, 64)


@given(rows=num_rows, size=world_size)
@example(rows=0, size=3)
@example(rows=1, size=7)
@example(rows=10**12, size=61)
@example(rows=10**12 + 39, size=64)
def test_every_row_belongs_to_exactly_one_rank(rows: int, size: int) -> None:
    shards = [rank_rows(rows, size, rank) for rank in range(size)]
    assert shards[0].start == 0
    assert shards[-1].stop == rows
    assert all(one.stop == other.start for one, other in pairwise(shards))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1


@given(
    sizes=st.lists(st.integers(0, 30), max_size=8),
    cut=st.tuples(st.integers(0, 250), st.integers(0, 250)),
)
def test_pieces_hold_the_rows_in_order(sizes: list[int], cut: tuple[int, int]) -> None:
    numbered = [(piece, row) for piece, size in enumerate(sizes) for row in range(size)]
    start, stop = sorted(min(end, len(numbered)) for end in cut)
    found = list(pieces_of(sizes, range(start, stop)))
    covered = [(part.piece, row) for part in found for row in range(part.start, part.stop)]
    assert covered == numbered[start:stop]
    assert all(part.start < part.stop for part in found), "a piece is read for nothing"


def test_pieces_of_a_trillion_rows() -> None:
    half = 5 * 10**11
    found = list(pieces_of([half, half], range(half - 1, half + 2)))
    assert found == [
        PieceRows(piece=0, start=half - 1, stop=half),
        PieceRows(piece=1, start=0, stop=2),
    ]


def batches_of_all_ranks(
    rows: int, size: int, batch_size: int, *, drop_last: bool
) -> list[list[range]]:
    lengths = [len(rank_rows(rows, size, rank)) for rank in range(size)]
    return [
        list(batch_rows(length, max(lengths), min(lengths), batch_size, drop_last=drop_last))
        for length in lengths
    ]


small = st.integers(0, 500)
batch_size = st.integers(1, 70)


@given(rows=small, size=st.integers(1, 12), batch_size=batch_size)
@example(rows=13, size=4, batch_size=3)
def test_all_rows_are_in_batches_of_nearly_the_same_size(
    rows: int, size: int, batch_size: int
) -> None:
    world = batches_of_all_ranks(rows, size, batch_size, drop_last=False)
    assert len({len(batches) for batches in world}) == 1
    for rank, batches in enumerate(world):
        read = [row for batch in batches for row in batch]
        assert read == list(range(len(rank_rows(rows, size, rank))))
    lengths = [len(batch) for batches in world for batch in batches]
    assert max(lengths, default=0) <= batch_size
    assert max(lengths, default=0) - min(lengths, default=0) <= 1


@given(rows=small, size=st.integers(1, 12), batch_size=batch_size)
def test_no_more_batches_than_needed(rows: int, size: int, batch_size: int) -> None:
    world = batches_of_all_ranks(rows, size, batch_size, drop_last=False)
    most = max(len(rank_rows(rows, size, rank)) for rank in range(size))
    assert (len(world[0]) - 1) * batch_size < most
    assert (most == 0) == (world[0] == [])


@given(rows=small, size=st.integers(1, 12), batch_size=batch_size)
def test_dropping_the_rest_leaves_full_batches_only(rows: int, size: int, batch_size: int) -> None:
    world = batches_of_all_ranks(rows, size, batch_size, drop_last=True)
    assert len({len(batches) for batches in world}) == 1
    for rank, batches in enumerate(world):
        assert all(len(batch) == batch_size for batch in batches)
        read = [row for batch in batches for row in batch]
        assert read == list(range(len(read)))
        # Of what this rank has, less than a batch and a row is left out.
        assert len(rank_rows(rows, size, rank)) - len(read) <= batch_size


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_rank_without_rows_keeps_step_with_the_others(drop_last: bool) -> None:
    empty = list(batch_rows(0, 1, 0, 8, drop_last=drop_last))
    full = list(batch_rows(1, 1, 0, 8, drop_last=drop_last))
    assert len(empty) == len(full)
