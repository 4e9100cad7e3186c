"""Where a rank stands in a data set, and what it records of that."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.data.cursor import Cursor, cursor_at
from polytrain.data.plan import Plan
from polytrain.data.position import DataChangedError, DataPosition

PLAN = Plan(rows=100, shards=2, shuffle=True)


def cursor(epoch: int = 0, position: int = 0) -> Cursor:
    return Cursor(DataPosition(epoch=epoch, position=position, plan=PLAN))


def stands(at: Cursor) -> tuple[int, int]:
    return at.position.epoch, at.position.position


def test_every_iteration_is_an_epoch() -> None:
    one = cursor()
    for number in range(3):
        assert stands(one) == (number, 0)
        with one.epoch() as epoch:
            assert (epoch.number, epoch.start) == (number, 0)
            for batch in epoch.global_batches(30, "keep"):
                epoch.given(batch.stop)
                assert stands(one) == (number, batch.stop)
    assert stands(one) == (3, 0)


def test_an_iteration_that_is_left_early_is_over() -> None:
    one = cursor()
    with one.epoch() as epoch:
        epoch.given(30)
    assert stands(one) == (1, 0)


def test_the_first_iteration_after_a_restart_goes_on() -> None:
    again = cursor_at("train", PLAN, {"train": cursor(4, 60).position})
    assert again.next_start == 60
    with again.epoch() as epoch:
        assert epoch.number == 4
        assert list(epoch.global_batches(20, "keep")) == [range(60, 80), range(80, 100)]
        epoch.given(100)
    with again.epoch() as epoch:
        assert (epoch.number, epoch.start) == (5, 0)


def test_of_two_iterations_at_once_the_later_counts() -> None:
    one = cursor()
    with one.epoch() as outer:
        outer.given(10)
        with one.epoch() as inner:
            inner.given(5)
            outer.given(50)
            assert stands(one) == (1, 5)
        assert stands(one) == (2, 0)
        outer.given(60)
        assert stands(one) == (2, 0)
    assert stands(one) == (2, 0)


@given(
    rows=st.integers(0, 2**62),
    shards=st.integers(1, 4096),
    shuffle=st.sampled_from([True, False, "window"]),
    seed=st.integers(-(2**63), 2**63 - 1),
    epoch=st.integers(0, 10**6),
)
def test_a_position_survives_a_manifest(
    rows: int, shards: int, shuffle: bool, seed: int, epoch: int
) -> None:
    plan = Plan(rows=rows, shards=shards, shuffle=shuffle, seed=seed)
    position = DataPosition(epoch=epoch, position=rows // 2, plan=plan)
    assert DataPosition.from_plain(json.loads(json.dumps(position.to_plain()))) == position


def test_canonical_shards_are_those_of_the_checkpoint() -> None:
    again = cursor_at("train", replace(PLAN, shards=7), {"train": cursor(0, 10).position})
    assert again.plan == PLAN


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": 101}, "rows=100 then, 101 now"),
        ({"seed": 1}, "seed=0 then, 1 now"),
        ({"shuffle": False}, "shuffle=True then, False now"),
    ],
)
def test_inside_an_epoch_the_order_can_not_be_changed(change: dict[str, int], told: str) -> None:
    now = replace(PLAN, **change)  # type: ignore[arg-type]  # one field at a time
    with pytest.raises(
        DataChangedError, match=f"row 10 of epoch 3 of the data set 'train'.*{told}"
    ):
        cursor_at("train", now, {"train": cursor(3, 10).position})
    between_epochs = cursor_at("train", now, {"train": cursor(3, 0).position})
    assert between_epochs.plan == replace(now, shards=2)
    assert between_epochs.position.epoch == 3
