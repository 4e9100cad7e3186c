"""Which rows are next, in which order, and whose they are."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from polytrain.data.plan.row_plan import Cut, Plan

shuffles = st.sampled_from([False, True, "window"])
world_sizes = st.integers(1, 12)
large_worlds = st.integers(1, 4096)
sizes = st.one_of(st.sampled_from([0, 1, 2, 97, 10**12, 10**12 + 39]), st.integers(0, 10**12))


@st.composite
def plans(draw: st.DrawFn, max_rows: int = 200) -> Plan:
    return Plan(
        rows=draw(st.integers(0, max_rows)),
        shards=draw(st.integers(1, 12)),
        shuffle=draw(shuffles),
        window=draw(st.integers(1, 40)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


def rows_of_batch(plan: Plan, epoch: int, batch: range, world_size: int) -> list[list[int]]:
    """The rows of a global batch, of each rank."""
    order = plan.epoch(epoch)
    return [
        [
            int(row)
            for shard, indices in plan.batch_share(batch.start, batch.stop, world_size, rank)
            for selection in order.of_shard(shard).select(indices)
            for row in selection.rows
        ]
        for rank in range(world_size)
    ]


def batches(
    plan: Plan, batch_rows: int, cut: Cut = "keep", start: int = 0, *, least: int = 1
) -> list[range]:
    found = []
    while (stop := plan.batch_stop(start, batch_rows, cut, least=least)) > start:
        found.append(range(start, stop))
        start = stop
    return found


# The rows of an epoch


@given(plan=plans(), epoch=st.integers(0, 5))
def test_every_row_comes_exactly_once_in_an_epoch(plan: Plan, epoch: int) -> None:
    order = plan.epoch(epoch)
    assert sorted(order[position] for position in range(plan.rows)) == list(range(plan.rows))


@given(plan=plans(), data=st.data())
def test_every_row_once_whatever_is_killed_and_resized(plan: Plan, data: st.DataObject) -> None:
    """The run stops after any batch, and goes on with other workers and batches of another size."""
    consumed: list[int] = []
    position = 0
    while position < plan.rows:
        world_size = data.draw(world_sizes)
        cut = data.draw(st.sampled_from(["keep", "share"]))
        size, least = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 30))
        stop = plan.batch_stop(position, size, cut, least=least)
        for of_rank in rows_of_batch(plan, 3, range(position, stop), world_size):
            consumed += of_rank
        position = stop
    assert sorted(consumed) == list(range(plan.rows))


@given(plan=plans(), batch_rows=st.integers(1, 60), one=world_sizes, other=world_sizes)
def test_a_global_batch_holds_the_same_rows_at_any_world_size(
    plan: Plan, batch_rows: int, one: int, other: int
) -> None:
    for batch in batches(plan, batch_rows):
        held = [sorted(chain(*rows_of_batch(plan, 0, batch, size))) for size in (one, other)]
        assert held[0] == held[1] == sorted(plan.epoch(0)[position] for position in batch)


@given(rows=sizes, shards=large_worlds, world_size=large_worlds, start=sizes, count=sizes)
@example(rows=10**12, shards=4096, world_size=4095, start=5 * 10**11, count=4096)
def test_ranks_divide_any_batch_of_any_size(
    rows: int, shards: int, world_size: int, start: int, count: int
) -> None:
    """As many rows as the batch has, over all ranks, without looking at a single row."""
    plan = Plan(rows=rows, shards=shards)
    start = min(start, rows)
    stop = min(start + count, rows)
    shares = [
        sum(len(part) for _, part in plan.batch_share(start, stop, world_size, rank))
        for rank in range(world_size)
    ]
    assert sum(shares) == stop - start
    # Each shard on the way to a rank's end may round by one, which is one row more or less.
    assert max(shares) - min(shares) <= 2 * (shards // world_size + 2)


@given(rows=sizes, shards=large_worlds, world_size=large_worlds)
def test_shares_are_consecutive_and_cover_the_data_set(
    rows: int, shards: int, world_size: int
) -> None:
    plan = Plan(rows=rows, shards=shards)
    shares = [plan.share(world_size, rank) for rank in range(world_size)]
    assert shares[0].start == 0
    assert shares[-1].stop == rows
    assert all(one.stop == other.start for one, other in pairwise(shares))
    if shards % world_size == 0:
        assert max(map(len, shares)) - min(map(len, shares)) <= shards // world_size


@given(plan=plans(), world_size=world_sizes, batch_rows=st.integers(1, 60))
def test_a_rank_needs_no_rows_beyond_its_reach(
    plan: Plan, world_size: int, batch_rows: int
) -> None:
    for batch in batches(plan, batch_rows):
        for rank, rows in enumerate(rows_of_batch(plan, 1, batch, world_size)):
            assert set(rows) <= set(plan.reach(world_size, rank))


@given(size=large_worlds, rows=sizes)
def test_with_as_many_workers_as_shards_each_reads_its_own(size: int, rows: int) -> None:
    plan = Plan(rows=rows, shards=size)
    for rank in {0, size // 2, size - 1}:
        assert plan.share(size, rank) == plan.reach(size, rank) == plan.shard_rows(rank)


@given(
    rows=st.integers(8, 200),
    shuffle=shuffles,
    batch_rows=st.integers(1, 60),
    world_size=st.sampled_from([1, 2, 4, 8]),
)
def test_eight_shards_are_shared_evenly_and_give_each_worker_rows_of_its_own(
    rows: int, shuffle: bool, batch_rows: int, world_size: int
) -> None:
    plan = Plan(rows=rows, shards=8, shuffle=shuffle, window=16)
    reaches = [plan.reach(world_size, rank) for rank in range(world_size)]
    assert [*chain(*reaches)] == list(range(rows))
    for batch in batches(plan, batch_rows):
        found = rows_of_batch(plan, 0, batch, world_size)
        assert max(map(len, found)) - min(map(len, found)) <= 1
        assert sorted(chain(*found)) == sorted(rows_of_batch(plan, 0, batch, 1)[0])


# Order


def test_without_shuffling_one_worker_reads_the_rows_as_they_come() -> None:
    plan = Plan(rows=10, shards=1)
    assert [rows_of_batch(plan, 0, batch, 1)[0] for batch in batches(plan, 4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


@pytest.mark.parametrize("shuffle", [True, "window"])
def test_every_epoch_and_seed_has_an_order_of_its_own(shuffle: bool) -> None:
    plan = Plan(rows=1000, shards=4, shuffle=shuffle, window=100)
    orders = [
        tuple(of.epoch(epoch)[position] for position in range(1000))
        for of in (plan, replace(plan, seed=1), replace(plan, seed=-1))
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_the_same_seed_gives_the_same_order_in_another_process(shuffle: bool) -> None:
    """As on another machine: nothing of it depends on hashes or addresses of a process."""
    plan = Plan(rows=500, shards=3, shuffle=shuffle, window=64, seed=7)
    script = (
        "from polytrain.data.plan.row_plan import Plan\n"
        f"order = {plan!r}.epoch(2)\n"
        "print([order[position] for position in range(500)])"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "12345"},
    )
    assert process.stdout.strip() == str([plan.epoch(2)[position] for position in range(500)])


def test_rows_of_a_window_lie_together() -> None:
    plan = Plan(rows=100, shards=1, shuffle="window", window=20)
    order = plan.epoch(0)
    windows = [{order[p] // 20 for p in range(start, start + 20)} for start in range(0, 100, 20)]
    assert all(len(window) == 1 for window in windows)
    assert [order[p] for p in range(20)] != sorted(order[p] for p in range(20))


@given(plan=plans(), data=st.data())
def test_a_selection_is_the_end_of_its_whole_regions(plan: Plan, data: st.DataObject) -> None:
    """The read-ahead relies on it: regions come once and in order, and hold the selected rows."""
    shard = data.draw(st.integers(0, plan.shards - 1))
    order = plan.epoch(0).of_shard(shard)
    size = len(order)
    assert size == len(plan.shard_rows(shard))
    assume(size)
    first = data.draw(st.integers(0, size - 1))
    selections = [*order.select(range(first, size))]
    selected = [int(row) for selection in selections for row in selection.rows]
    whole = [int(row) for selection in selections for row in selection.whole.rows]
    # The first region may hold rows that came before.
    assert whole[len(whole) - len(selected) :] == selected
    assert len({selection.region for selection in selections}) == len(selections)
    assert all({*map(int, one.whole.rows)} == {*one.region} for one in selections)


def test_shuffled_rows_are_anywhere_with_the_same_chance() -> None:
    """Each of 20 rows at each of 20 places, over 4,000 epochs."""
    plan = Plan(rows=20, shards=1, shuffle=True)
    counts = np.zeros((20, 20))
    neighbours = 0
    for number in range(4000):
        rows = [int(row) for row in rows_of_batch(plan, number, range(20), 1)[0]]
        counts[np.arange(20), rows] += 1
        neighbours += sum(other == one + 1 for one, other in pairwise(rows))
    expected = 4000 / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 361 degrees of freedom: more than 450 would happen once in a thousand times.
    assert chi_square < 450
    # Of 19 pairs of neighbours each is the next row's with a chance of 1 in 20.
    assert neighbours / 4000 == pytest.approx(19 / 20, abs=0.05)


def test_a_trillion_rows_cost_nothing() -> None:
    plan = Plan(rows=10**12, shards=64, shuffle="window", window=1 << 20)
    tracemalloc.start()
    order = plan.epoch(5)
    rows = [order[position] for position in range(10**12 - 3, 10**12)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(rows)) == 3
    assert peak < 1 << 20


# Batches


@given(plan=plans(), batch_rows=st.integers(1, 60), start=st.integers(0, 200))
def test_kept_rows_are_the_last_batch(plan: Plan, batch_rows: int, start: int) -> None:
    """As in a loader of one process: all batches before it are full."""
    start = min(start, plan.rows)
    found = batches(plan, batch_rows, "keep", start)
    assert len(found) == plan.num_batches(start, batch_rows, "keep")
    whole = range(start, plan.rows)
    assert found == [whole[n : n + batch_rows] for n in range(0, len(whole), batch_rows)]


@given(plan=plans(), batch_rows=st.integers(1, 60), least=st.integers(1, 30))
def test_a_batch_leaves_rows_to_a_last_one_that_is_too_small(
    plan: Plan, batch_rows: int, least: int
) -> None:
    kept = [len(batch) for batch in batches(plan, batch_rows)]
    shared = [len(batch) for batch in batches(plan, batch_rows, "share", least=least)]
    if len(kept) > 1 and kept[-1] < least <= (batch_rows + 1) // 2:
        assert shared == [*kept[:-2], kept[-2] - least, kept[-1] + least]
        assert shared[-1] <= batch_rows
    else:
        assert shared == kept


@given(rows=st.integers(1, 200), size=world_sizes, per_rank=st.integers(2, 20))
@example(rows=13, size=2, per_rank=2)
def test_no_rank_is_without_a_row_where_each_takes_two_or_more(
    rows: int, size: int, per_rank: int
) -> None:
    assume(rows >= size)
    plan = Plan(rows=rows, shards=1)
    found = [
        [*map(len, rows_of_batch(plan, 0, batch, size))]
        for batch in batches(plan, size * per_rank, "share", least=size)
    ]
    assert all(1 <= part <= per_rank for parts in found for part in parts)
    assert all(len({*parts}) == 1 for parts in found[:-1]), "only the last may be uneven"


@given(rows=st.integers(0, 200), shuffle=shuffles, size=world_sizes, per_rank=st.integers(1, 20))
def test_ranks_have_equal_parts_of_every_full_batch(
    rows: int, shuffle: bool, size: int, per_rank: int
) -> None:
    """With as many canonical shards as workers, or one, from which each takes its part."""
    for shards in (1, size):
        plan = Plan(rows=rows, shards=shards, shuffle=shuffle, window=16)
        for batch in batches(plan, size * per_rank):
            parts = [*map(len, rows_of_batch(plan, 0, batch, size))]
            if len(batch) == size * per_rank:
                assert parts == [per_rank] * size
            else:
                assert batch.stop == rows
                assert max(parts) - min(parts) <= 1


@given(plan=plans(), batch_rows=st.integers(1, 60), stops=st.integers(0, 10))
def test_batches_after_a_resume_are_those_of_the_uninterrupted_epoch(
    plan: Plan, batch_rows: int, stops: int
) -> None:
    cuts: tuple[Cut, ...] = ("keep", "share", "drop", "pad")
    for cut in cuts:
        whole = batches(plan, batch_rows, cut, least=batch_rows // 2)
        assert len(whole) == plan.num_batches(0, batch_rows, cut)
        for batch in whole[:stops]:
            left = batches(plan, batch_rows, cut, batch.stop, least=batch_rows // 2)
            assert left == whole[whole.index(batch) + 1 :]


@given(plan=plans(), batch_rows=st.integers(1, 60))
def test_dropping_leaves_full_batches_only(plan: Plan, batch_rows: int) -> None:
    found = batches(plan, batch_rows, "drop")
    assert all(len(batch) == batch_rows for batch in found)
    assert plan.rows - sum(map(len, found)) < batch_rows
    assert len(found) == plan.num_batches(0, batch_rows, "drop")


@given(plan=plans(), size=world_sizes, per_rank=st.integers(1, 20))
def test_padding_gives_all_ranks_full_batches_of_all_rows(
    plan: Plan, size: int, per_rank: int
) -> None:
    assume(plan.rows > 0)
    plan = replace(plan, shards=size if plan.rows >= size else 1)
    seen: set[int] = set()
    for batch in batches(plan, size * per_rank, "pad"):
        shares = rows_of_batch(plan, 0, batch, size)
        assert {len(share) for share in shares} == {per_rank}
        seen |= {row for share in shares for row in share}
    assert seen == set(range(plan.rows))


@given(rows=st.integers(0, 500), size=world_sizes, per_rank=st.integers(1, 70))
@example(rows=13, size=4, per_rank=3)
def test_a_rank_gets_at_most_the_batch_size_it_asked_for(
    rows: int, size: int, per_rank: int
) -> None:
    plan = Plan(rows=rows, shards=size)
    for batch in batches(plan, size * per_rank):
        shares = [len(share) for share in rows_of_batch(plan, 0, batch, size)]
        assert max(shares) <= per_rank
        assert max(shares) - min(shares) <= 1


@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 9),
    cut=st.sampled_from(["keep", "share", "pad", "drop"]),
    bad=st.sets(st.integers(0, 59), max_size=4),
)
def test_batches_that_are_left_out_are_missing_and_the_others_are_the_same(
    rows: int, size: int, cut: Cut, bad: set[int]
) -> None:
    plan = Plan(rows=rows, shards=1)
    every = [*plan.global_batches(0, size, cut)]
    holes = [batch for batch in every if not bad.isdisjoint(batch)]
    kept = [*plan.global_batches(0, size, cut, skipped=holes)]
    assert kept == [batch for batch in every if batch not in holes]
    assert plan.num_batches(0, size, cut, skipped=holes) == len(kept)


@given(
    size=st.integers(1, 9),
    start=st.integers(0, 30),
    hole=st.integers(0, 50).flatmap(
        lambda first: st.integers(first + 1, 60).map(lambda stop: range(first, stop))
    ),
    cut=st.sampled_from(["keep", "share", "pad", "drop"]),
)
def test_batches_of_another_size_leave_the_same_rows_out(
    size: int, start: int, hole: range, cut: Cut
) -> None:
    plan = Plan(rows=60, shards=1)
    for least in (1, size):
        counted = plan.num_batches(start, size, cut, least=least, skipped=[hole])
        assert counted == len([*plan.global_batches(start, size, cut, least=least, skipped=[hole])])
    batches = [*plan.global_batches(start, size, cut, skipped=[hole])]
    given_rows = [row for batch in batches for row in batch]
    assert given_rows == sorted({*given_rows} - {*hole})
    if cut == "keep":
        assert given_rows == [row for row in range(start, 60) if row not in hole]
    if cut in ("pad", "drop"):
        assert all(len(batch) == size for batch in batches)
