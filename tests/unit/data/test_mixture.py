"""Which source of a mix has each position, and which of its rows."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain
from math import ceil, floor

from hypothesis import given
from hypothesis import strategies as st

from polytrain.data.plan.mixture import Mixture, parts_of
from polytrain.data.plan.row_plan import Plan

weights = st.lists(
    st.one_of(st.floats(0.001, 100, allow_nan=False), st.integers(1, 1000)), min_size=1, max_size=8
)
decimals = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    parts = parts_of(draw(decimals))
    return Mixture(rows=tuple(draw(st.integers(1, 60)) for _ in parts), parts=parts)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(
        rows=draw(st.integers(1, 300)),
        shards=1,
        shuffle=draw(st.sampled_from([False, True, "window"])),
        window=draw(st.integers(1, 40)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        mix=draw(mixtures()),
    )


def share(plan: Plan, batch: range, world_size: int, rank: int, epoch: int = 0) -> list[int]:
    """The rows of one rank, in order."""
    place = batch.start, batch.stop, world_size, rank
    rows = [
        int(row)
        for source, indices in plan.batch_share(*place)
        for selection in plan.epoch(epoch).of_shard(source).select(indices)
        for row in selection.rows
    ]
    order = plan.batch_order(*place)
    return rows if order is None else [rows[index] for index in order]


def source_of(plan: Plan, row: int) -> int:
    assert plan.mix is not None
    return next(n for n in range(len(plan.mix.rows)) if row in plan.mix.rows_of(n))


# Shares


@given(parts=decimals, length=st.integers(0, 2000))
def test_a_source_has_its_share_of_any_first_rows_rounded_down_or_up(
    parts: list[int], length: int
) -> None:
    mix = Mixture(rows=(1,) * len(parts), parts=tuple(parts))
    counted = {source: len(indices) for source, indices in mix.share(range(length))}
    for source, part in enumerate(parts):
        exact = Fraction(length * part, sum(parts))
        assert floor(exact) <= counted.get(source, 0) <= ceil(exact)
        assert counted.get(source, 0) == mix.drawn(source, length)


@given(weights=weights)
def test_parts_are_in_the_ratio_of_the_weights(weights: list[float]) -> None:
    parts = parts_of(weights)
    for part, weight in zip(parts, weights, strict=True):
        share = weight / sum(weights)
        assert part >= 1
        assert abs(part / sum(parts) - share) < len(weights) / 65_536


def test_decimals_are_exact_and_scale_does_not_matter() -> None:
    assert parts_of([0.3, 0.7]) == parts_of([3, 7]) == parts_of([30.0, 70.0]) == (3, 7)


@given(mix=mixtures(), index=st.integers(0, 200))
def test_a_row_of_a_source_is_at_its_position(mix: Mixture, index: int) -> None:
    for source in range(len(mix.rows)):
        position = mix.position_of(source, index)
        assert [each for each in mix.share(range(position, position + 1))] == [
            (source, range(index, index + 1))
        ]


# Rows


@given(plan=plans(), epochs=st.integers(1, 4))
def test_each_row_of_a_source_comes_once_in_each_pass_over_all_epochs(
    plan: Plan, epochs: int
) -> None:
    assert plan.mix is not None
    read: dict[int, list[int]] = {}
    for epoch in range(epochs):
        for row in share(plan, range(plan.rows), 1, 0, epoch):
            read.setdefault(source_of(plan, row), []).append(row)
    for source, rows in read.items():
        own = plan.mix.rows_of(source)
        for start in range(0, len(rows), len(own)):
            found = rows[start : start + len(own)]
            assert len(set(found)) == len(found)
            assert set(found) <= set(own)


@given(plan=plans(), world=st.integers(1, 8), virtual=st.integers(1, 8), data=st.data())
def test_a_position_has_the_same_row_for_any_workers_wherever_a_run_resumes(
    plan: Plan, world: int, virtual: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, plan.rows))
    stop = data.draw(st.integers(start, plan.rows))
    order = plan.epoch(1)
    wanted = [order[position] for position in range(start, stop)]
    for number in (world, virtual):
        found = [share(plan, range(start, stop), number, rank, 1) for rank in range(number)]
        assert [*chain(*found)] == wanted


@given(plan=plans(), more=st.integers(0, 100))
def test_a_longer_epoch_begins_as_a_shorter_one(plan: Plan, more: int) -> None:
    assert plan.mix is not None
    longer = Plan(
        rows=plan.rows + more,
        shards=1,
        shuffle=plan.shuffle,
        window=plan.window,
        seed=plan.seed,
        mix=plan.mix,
    )
    assert share(longer, range(plan.rows), 1, 0) == share(plan, range(plan.rows), 1, 0)


def test_padding_takes_the_rows_of_the_start() -> None:
    plan = Plan(rows=5, shards=1, shuffle=True, mix=Mixture(rows=(4, 9), parts=(1, 2)))
    whole = share(plan, range(5), 1, 0)
    assert share(plan, range(4, 8), 1, 0) == [whole[4], *whole[:3]]


def test_passes_have_orders_of_their_own() -> None:
    plan = Plan(rows=400, shards=1, shuffle=True, mix=Mixture(rows=(100,), parts=(1,)))
    orders = [share(plan, range(first, first + 100), 1, 0) for first in range(0, 400, 100)]
    assert len({*map(tuple, orders)}) == 4
    assert share(plan, range(100), 1, 0, epoch=1) not in orders
