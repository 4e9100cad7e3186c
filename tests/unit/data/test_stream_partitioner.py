"""Blocks divided among ranks: every row exactly once, evenly, over any history of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.data.plan.stream_partitioner import (
    BlockRows,
    Round,
    Segment,
    StreamPartitioner,
    rank_total,
)

Row = tuple[int, int]
"""A block's number, and a row of it."""

world_sizes = st.integers(1, 7)
histories = st.lists(st.builds(Segment, world_sizes, st.integers(0, 25)), max_size=5)
streams = st.lists(st.integers(0, 12), max_size=30)


def rounds(
    blocks: Sequence[int], world_size: int, segments: Sequence[Segment] = ()
) -> list[Round[int]]:
    """All rounds of blocks of these sizes."""
    partitioner = StreamPartitioner[int](world_size, segments)
    found = [partitioner.add(BlockRows(block, 0, rows)) for block, rows in enumerate(blocks)]
    found.append(partitioner.finish())
    given = [parts for parts in found if parts is not None]
    assert partitioner.rows_in_rounds == sum(map(sum, sizes(given)))
    return given


def sizes(given: Sequence[Round[int]]) -> list[list[int]]:
    """Per round, the number of rows of each rank."""
    return [[sum(map(len, part)) for part in parts] for parts in given]


def rows_by_rank(given: Sequence[Round[int]], world_size: int) -> list[list[Row]]:
    """What each rank gets, in order."""
    return [
        [(some.block, row) for parts in given for some in parts[rank] for row in _rows(some)]
        for rank in range(world_size)
    ]


def _rows(some: BlockRows[int]) -> range:
    return range(some.start, some.stop)


def ranks(
    blocks: Sequence[int], world_size: int, segments: Sequence[Segment] = ()
) -> list[list[Row]]:
    return rows_by_rank(rounds(blocks, world_size, segments), world_size)


def all_rows(blocks: Sequence[int]) -> Counter[Row]:
    return Counter((block, row) for block, size in enumerate(blocks) for row in range(size))


@given(streams, histories, world_sizes)
def test_every_row_is_consumed_once_over_any_history(
    blocks: list[int], segments: list[Segment], world_size: int
) -> None:
    consumed: Counter[Row] = Counter()
    for number, segment in enumerate(segments):
        for rows in ranks(blocks, segment.world_size, segments[:number]):
            consumed.update(rows[: segment.rows])
    for rows in ranks(blocks, world_size, segments):
        consumed.update(rows)
    assert consumed == all_rows(blocks)


@given(streams, histories, world_sizes)
def test_ranks_never_are_more_than_a_row_apart(
    blocks: list[int], segments: list[Segment], world_size: int
) -> None:
    totals = [0] * world_size
    for round_sizes in sizes(rounds(blocks, world_size, segments)):
        totals = [total + size for total, size in zip(totals, round_sizes, strict=True)]
        assert max(totals) - min(totals) <= 1
        assert totals == [rank_total(sum(totals), world_size, rank) for rank in range(world_size)]


@given(streams, histories, world_sizes, st.integers(0, 25))
def test_the_same_world_goes_on_as_if_nothing_had_happened(
    blocks: list[int], segments: list[Segment], world_size: int, rows: int
) -> None:
    whole = ranks(blocks, world_size, segments)
    resumed = ranks(blocks, world_size, [*segments, Segment(world_size, rows)])
    assert resumed == [rank[rows:] for rank in whole]


@given(streams, histories, world_sizes, world_sizes)
def test_a_leg_without_rows_changes_nothing(
    blocks: list[int], segments: list[Segment], former: int, world_size: int
) -> None:
    assert rounds(blocks, world_size, [*segments, Segment(former, 0)]) == rounds(
        blocks, world_size, segments
    )


@given(streams, histories, world_sizes)
def test_a_round_is_known_before_later_blocks_are(
    blocks: list[int], segments: list[Segment], world_size: int
) -> None:
    cut = len(blocks) // 2
    partitioner = StreamPartitioner[int](world_size, segments)
    found = [partitioner.add(BlockRows(block, 0, rows)) for block, rows in enumerate(blocks[:cut])]
    early = [parts for parts in found if parts is not None]
    assert rounds(blocks, world_size, segments)[: len(early)] == early


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 4))
def test_of_even_blocks_each_rank_gets_one_whole(world_size: int, size: int, turns: int) -> None:
    for number, parts in enumerate(rounds([size] * (world_size * turns), world_size)):
        for rank, part in enumerate(parts):
            assert part == (BlockRows(number * world_size + rank, 0, size),)


def test_blocks_that_were_consumed_are_in_no_round() -> None:
    # Two ranks consumed 5 rows each: blocks 0 and 1, and two rows of the four in blocks 2 and 3.
    assert rounds([4, 4, 2, 2, 4], 2, [Segment(2, 5)]) == [
        ((BlockRows(2, 1, 2),), (BlockRows(3, 1, 2),)),
        ((BlockRows(4, 0, 2),), (BlockRows(4, 2, 4),)),
    ]


def test_another_world_begins_with_what_was_left() -> None:
    assert rounds([4, 4, 3], 3, [Segment(2, 2)]) == [
        ((BlockRows(0, 2, 4),), (BlockRows(1, 2, 3),), (BlockRows(1, 3, 4),)),
        ((BlockRows(2, 0, 1),), (BlockRows(2, 1, 2),), (BlockRows(2, 2, 3),)),
    ]


def test_blocks_without_rows_fill_no_round() -> None:
    assert rounds([0, 1, 0, 0, 1, 0], 2) == [((BlockRows(1, 0, 1),), (BlockRows(4, 0, 1),))]


def test_an_epoch_that_was_consumed_has_no_rounds() -> None:
    assert rounds([3, 3], 2, [Segment(2, 100)]) == []
    assert rounds([3, 3], 5, [Segment(2, 3)]) == []


@pytest.mark.parametrize(
    ("world_size", "segments"), [(0, ()), (1, (Segment(0, 1),)), (1, (Segment(1, -1),))]
)
def test_impossible_worlds_are_refused(world_size: int, segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match="at least"):
        StreamPartitioner[int](world_size, segments)
