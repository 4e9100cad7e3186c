"""Where a rank stands in a data set, and what it records of that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.shards import shard_of

from polytrain.data.plan.cursor import Cursor
from polytrain.data.plan.position import DataChangedError, DataPosition, StreamPosition
from polytrain.data.plan.row_plan import Plan
from polytrain.data.plan.stream_partitioner import Segment

PLAN = Plan(rows=100, shards=2, shuffle=True)


def cursor(epoch: int = 0, start: int = 0) -> Cursor[DataPosition]:
    return Cursor(DataPosition(epoch=epoch, start=start, plan=PLAN))


def stands(at: Cursor[Any]) -> tuple[int, int]:
    return at.position.epoch, at.position.start


def test_every_iteration_is_an_epoch() -> None:
    one = cursor()
    for number in range(3):
        assert stands(one) == (number, 0)
        with one.epoch() as epoch:
            assert (epoch.number, epoch.start) == (number, 0)
            for stop in (30, 60, 100):
                epoch.given(stop)
                assert stands(one) == (number, stop)
    assert stands(one) == (3, 0)


def test_an_iteration_that_is_left_early_is_over() -> None:
    one = cursor()
    with one.epoch() as epoch:
        epoch.given(30)
    assert stands(one) == (1, 0)


def test_the_first_iteration_after_a_restart_goes_on() -> None:
    again = Cursor(DataPosition.resume("train", cursor(4, 60).position.to_plain(), PLAN, {}))
    assert again.next_epoch().start == 60
    with again.epoch() as epoch:
        assert (epoch.number, epoch.start) == (4, 60)
        epoch.given(100)
    with again.epoch() as epoch:
        assert (epoch.number, epoch.start) == (5, 0)


def batches(one: Cursor[DataPosition]) -> Iterator[int]:
    with one.epoch() as epoch:
        for stop in (30, 60, 100):
            epoch.given(stop)
            yield stop


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_checkpoint_after_a_loop_whose_iterator_is_still_there_is_ambiguous(
    count: int, is_held: bool
) -> None:
    """With three it has given all batches, but has never been asked for a fourth one."""
    one = cursor()
    loop = batches(one)
    for _ in range(count):
        next(loop)
    if not is_held:
        loop.close()
    one.recorded()
    assert not one.is_ambiguous
    loop.close()
    again = batches(one)
    next(again)
    assert one.is_ambiguous is is_held


def resumed(*, by_position: bool = True) -> Cursor[DataPosition]:
    again = Cursor(DataPosition(epoch=4, start=10, plan=PLAN), resumes=True)
    again.begins_anywhere = by_position
    return again


def test_a_look_at_the_first_batch_leaves_the_place_of_a_restart() -> None:
    again = resumed()
    for _ in range(2):
        assert next(batches(again)) == 30
        assert stands(again) == (4, 10)
    held = batches(again)
    next(held)
    assert again.next_epoch().start == 10
    with again.epoch() as epoch:
        assert (epoch.number, epoch.start) == (4, 10)
        epoch.given(60)
        epoch.given(100)
    assert stands(again) == (5, 0)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_look_before_the_training_is_not_read_for_its_first_report(is_held: bool) -> None:
    one = cursor()
    loops = [batches(one) for _ in range(2)]
    for loop in loops:
        next(loop)
        if not is_held:
            loop.close()
    with one.epoch() as epoch:
        epoch.given(30)
        one.reported()
        assert one.looked_past is not None
        assert (one.looked_past.epoch, one.looked_past.start) == (2, 0)
        epoch.given(60)
        one.reported()
        assert one.looked_past is None


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(lambda one, loop: one.reported(), id="report"),
        pytest.param(lambda one, loop: next(loop), id="second batch"),
    ],
)
def test_a_loop_that_trains_is_more_than_a_look(
    train: Callable[[Cursor[DataPosition], Iterator[int]], None],
) -> None:
    again = resumed()
    loop = batches(again)
    next(loop)
    train(again, loop)
    loop.close()
    assert stands(again) == (5, 0)


def test_what_was_looked_at_may_turn_out_to_be_the_training() -> None:
    """As with `batch = next(iter(loader))` in each step."""
    again = resumed()
    next(batches(again))
    again.reported()
    assert stands(again) == (5, 0)
    next(batches(again))
    assert stands(again) == (6, 0)


def test_a_look_before_a_loop_is_none_of_its_steps() -> None:
    again = resumed()
    next(batches(again))
    loop = batches(again)
    next(loop)
    again.reported()
    assert stands(again) == (4, 30)


def test_a_loop_over_the_only_batch_that_is_left_is_more_than_a_look() -> None:
    again = resumed()
    with again.epoch() as epoch:
        epoch.given(100)
    assert stands(again) == (5, 0)


def test_a_library_that_ends_an_epoch_has_trained() -> None:
    again = resumed()
    with again.epoch() as epoch:
        epoch.given(100)
        epoch.end()
        assert stands(again) == (5, 0)


def test_a_run_that_starts_counts_each_loop() -> None:
    one = cursor()
    one.begins_anywhere = True
    next(batches(one))
    assert stands(one) == (1, 0)


@pytest.mark.parametrize("looks", [1, 2])
def test_a_look_that_takes_the_rest_ahead_counts_once_it_is_reported(looks: int) -> None:
    """TensorFlow takes some batches ahead, also if only one is wanted."""
    again = resumed()
    for _ in range(looks):
        assert again.next_epoch().end_looked_ahead()
        assert stands(again) == (4, 10)
    trained = again.next_epoch()
    assert (trained.number, trained.start) == (4, 10)
    trained.given(80)
    again.reported()
    assert stands(again) == (4, 80)
    trained.end()
    assert stands(again) == (5, 0)


def test_a_rest_that_was_taken_ahead_is_trained_on_at_a_report() -> None:
    again = resumed()
    assert again.next_epoch().end_looked_ahead()
    again.reported()
    assert stands(again) == (5, 0)
    assert not again.next_epoch().end_looked_ahead(), "a whole epoch is no look"
    assert not resumed(by_position=False).next_epoch().end_looked_ahead()


def read_some(one: Cursor[DataPosition], count: int) -> None:
    loop = batches(one)
    for _ in range(count):
        next(loop)
    loop.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_look_after_a_report_is_noted_once_the_training_continues(count: int) -> None:
    one = cursor()
    assert [*batches(one)] == [30, 60, 100]
    one.reported()
    read_some(one, count)
    assert one.look is None, "it may be the training"
    read_some(one, 1)
    assert one.look is not None
    assert (one.look.number, one.look.batches) == (1, count)


@pytest.mark.parametrize("kind", ["before the first report", "reported", "complete"])
def test_what_is_no_look(kind: str) -> None:
    one = cursor()
    if kind != "before the first report":
        one.reported()
    if kind == "complete":
        assert [*batches(one)] == [30, 60, 100]
    else:
        read_some(one, 2)
    if kind == "reported":
        one.reported()
    read_some(one, 1)
    assert one.look is None


def test_a_loop_in_which_something_is_reported_is_no_look() -> None:
    one = cursor()
    one.reported()
    loop = batches(one)
    next(loop)
    one.reported()
    loop.close()
    read_some(one, 1)
    assert one.look is None


def test_what_reads_in_one_pass_cannot_look() -> None:
    again = resumed(by_position=False)
    next(batches(again))
    assert stands(again) == (5, 0)


def test_a_new_loop_beside_one_that_a_checkpoint_is_in_is_ambiguous() -> None:
    one = cursor()
    loop, again = batches(one), batches(one)
    next(loop)
    one.recorded()
    next(again)
    assert one.is_ambiguous


def test_a_checkpoint_within_a_loop_that_goes_on_is_not_ambiguous() -> None:
    one = cursor()
    for _ in range(2):
        for _ in batches(one):
            one.recorded()
    loop = batches(one)
    next(loop)
    one.recorded()
    next(loop)
    loop.close()
    next(batches(one))
    assert not one.is_ambiguous


def test_of_two_iterations_at_once_the_later_counts() -> None:
    one = cursor()
    outer = one.next_epoch()
    outer.given(10)
    inner = one.next_epoch()
    inner.given(5)
    outer.given(50)
    assert stands(one) == (1, 5)
    inner.end()
    assert stands(one) == (2, 0)
    outer.given(60)
    outer.end()
    assert stands(one) == (2, 0)


def shard_of_ten(**options: Any) -> Any:
    return shard_of({"x": list(range(10))}, **options).iter_batches(batch_size=2)


def test_a_loop_does_not_go_on_after_one_within_it() -> None:
    """Whatever its position were, some rows would be left out after a restart."""
    batches = shard_of_ten()
    inner = []

    def nested() -> None:
        for _ in batches:
            inner.append(sum(len(batch["x"]) for batch in batches))

    with pytest.raises(RuntimeError, match=r"within a loop over the same one.*under another name"):
        nested()
    assert inner == [10]


def test_a_loop_does_not_end_after_one_within_its_last_step() -> None:
    batches = shard_of_ten(remainder="keep")

    def nested() -> None:
        for number, _ in enumerate(batches):
            if number == 4:
                next(iter(batches))

    with pytest.raises(RuntimeError, match="within a loop over the same one"):
        nested()


def test_an_iterator_may_be_left_behind() -> None:
    batches = shard_of_ten()
    tried = iter(batches)
    next(tried)
    assert [len(batch["x"]) for batch in batches] == [2] * 5
    with pytest.raises(RuntimeError, match="within a loop over the same one"):
        next(tried)


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
    position = DataPosition(epoch=epoch, start=rows // 2, plan=plan)
    assert DataPosition.from_plain(json.loads(json.dumps(position.to_plain()))) == position


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 101}, "rows=100 then, 101 now"),
        ({"seed": 1}, "seed=0 then, 1 now"),
        ({"shuffle": False}, "shuffle=True then, False now"),
        ({"shards": 7}, "shards=2 then, 7 now"),
    ],
)
def test_inside_an_epoch_the_order_can_not_be_changed(change: dict[str, int], message: str) -> None:
    now = replace(PLAN, **change)  # type: ignore[arg-type]  # one field at a time
    with pytest.raises(
        DataChangedError, match=f"row 10 of epoch 3 of the data set 'train'.*{message}"
    ):
        DataPosition.resume("train", cursor(3, 10).position.to_plain(), now, {})
    between_epochs = DataPosition.resume("train", cursor(3, 0).position.to_plain(), now, {})
    assert between_epochs.plan == now
    assert between_epochs.epoch == 3


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (True, "whole on each worker then, split over the workers now"),
        (False, "split over the workers then, whole on each worker now"),
    ],
)
def test_inside_an_epoch_rows_are_not_split_otherwise(then: bool, message: str) -> None:
    begun = DataPosition(epoch=3, start=10, plan=PLAN, whole=then)
    for position in (begun, begun.moved(4, 20)):
        plain = json.loads(json.dumps(position.to_plain()))
        assert DataPosition.resume("train", plain, PLAN, {}, whole=then) == position
        with pytest.raises(DataChangedError, match=message):
            DataPosition.resume("train", plain, PLAN, {}, whole=not then)
    between_epochs = begun.moved(4, 0).to_plain()
    assert DataPosition.resume("train", between_epochs, PLAN, {}, whole=not then).whole != then


def test_an_epoch_of_which_nothing_was_given_may_be_asked_for_again() -> None:
    one = cursor()
    discarded, used = one.next_epoch(), one.next_epoch()
    assert discarded.number == used.number == 0
    used.given(10)
    discarded.end()
    assert stands(one) == (0, 10)
    assert one.next_epoch().number == 1


def test_a_stream_remembers_each_world_that_read_the_epoch() -> None:
    one = Cursor(StreamPosition(world_size=2))
    epoch = one.next_epoch()
    epoch.given(30)
    plain = json.loads(json.dumps(one.position.to_plain()))
    again = Cursor(StreamPosition.from_plain(plain, world_size=3))
    assert again.position.segments == (Segment(2, 30),)
    with again.epoch() as epoch:
        epoch.given(7)
        assert again.position.to_plain() == {
            "epoch": 0,
            "segments": [[2, 30], [3, 7]],
            "digests": {},
        }
    assert again.position.to_plain() == {"epoch": 1, "segments": [], "digests": {}}


def test_inside_an_epoch_a_stream_can_not_be_another_one() -> None:
    steps = {"steps of the pipeline": "abc"}
    one = Cursor(StreamPosition.resume("train", None, 2, steps))
    with one.epoch() as epoch:
        epoch.given(30)
        plain = json.loads(json.dumps(one.position.to_plain()))
    assert StreamPosition.resume("train", plain, 3, steps).segments == (Segment(2, 30),)
    other = {"steps of the pipeline": "abd"}
    with pytest.raises(DataChangedError, match=r"epoch 0 of .*'train'.*other steps of the pipe"):
        StreamPosition.resume("train", plain, 3, other)
    between_epochs = json.loads(json.dumps(one.position.to_plain()))
    assert StreamPosition.resume("train", between_epochs, 3, other).epoch == 1


def test_a_stream_can_not_go_on_as_a_table() -> None:
    stream = StreamPosition(world_size=2, start=5).to_plain()
    with pytest.raises(DataChangedError, match="'train' was a stream"):
        DataPosition.resume("train", stream, PLAN, {})


def test_a_cursor_knows_what_is_left_out_in_each_epoch() -> None:
    left_out = [(1, 4, 6), (0, 8, 10), (0, 2, 4), (0, 3, 5)]
    cursor = Cursor(DataPosition(plan=Plan(rows=10, shards=1)), skipped=left_out)
    assert cursor.next_epoch().skipped == (range(2, 5), range(8, 10))
    with cursor.epoch() as epoch:
        assert epoch.skipped == (range(2, 5), range(8, 10))
        assert cursor.next_epoch().skipped == (range(4, 6),)
    assert cursor.skipped_in(2) == ()


def test_a_batch_that_is_too_short_before_what_is_left_out_is_not_counted() -> None:
    """Position 4 alone would be a batch with a row for one of the two ranks."""
    shard = shard_of(pa.table({"x": range(16)}), world_size=2, rank=1, skipped=[(0, 5, 8)])
    left = shard.num_batches(batch_size=2)
    assert left == len([*shard.iter_batches(batch_size=2)]) == 3


def test_frameworks_that_take_batches_ahead_get_none_that_are_left_out() -> None:
    """In the first epoch the second and the last batch of four are left out, over two ranks."""
    data = pa.table({"x": range(16)})
    taken = []
    for rank in (0, 1):
        shard = shard_of(data, world_size=2, rank=rank, skipped=[(0, 4, 8), (0, 12, 16)])
        for _ in range(2):
            left = shard.num_batches(global_batch_size=4)
            ahead = shard.iter_ahead(global_batch_size=4)
            batches = []
            for batch in ahead:
                batches.append(batch["x"].tolist())
                ahead.used()
            assert len(batches) == left
            taken.append(batches)
        assert shard.cursor.position.epoch == 2
    firsts = [sorted(mine + others) for mine, others in zip(taken[0], taken[2], strict=True)]
    assert firsts == [[*range(4)], [*range(8, 12)]]
    assert [len(epoch) for epoch in taken] == [2, 4, 2, 4]
