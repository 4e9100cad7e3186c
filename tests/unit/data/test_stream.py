"""A shard of a stream: batches alike on all ranks, every row once, and on from any place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.collected import collect_while_a_thread_starts

from polytrain.data.plan.cursor import Cursor
from polytrain.data.plan.position import StreamPosition
from polytrain.data.plan.stream_partitioner import BlockRows, Round, Segment, StreamPartitioner
from polytrain.data.shards.spec import StreamSpec
from polytrain.data.shards.stream_shard import PartSource, StreamShard
from polytrain.data_errors import StreamLostError
from polytrain.errors import BadDataError

SCHEMA = pa.schema([("id", pa.int64())])


class Parts(PartSource):
    """One rank's parts of a stream of these blocks, divided as in a run."""

    def __init__(self, blocks: Sequence[int], world_size: int, rank: int) -> None:
        self._blocks = blocks
        self._world_size = world_size
        self._rank = rank
        self._rounds: list[Round[int]] = []
        self._total = 0

    def begin(self, epoch: int, segments: Sequence[Segment]) -> None:
        partitioner: StreamPartitioner[int] = StreamPartitioner(self._world_size, segments)
        added = [partitioner.add(BlockRows(n, 0, size)) for n, size in enumerate(self._blocks)]
        self._rounds = [found for found in (*added, partitioner.finish()) if found is not None]
        self._total = partitioner.rows_in_rounds

    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        if index == len(self._rounds):
            return self._total
        firsts = [sum(self._blocks[:number]) for number in range(len(self._blocks))]
        rows = [
            firsts[some.block] + row
            for some in self._rounds[index][self._rank]
            for row in range(some.start, some.stop)
        ]
        return pa.table({"id": pa.array(rows, pa.int64())})


def world(
    blocks: Sequence[int],
    size: int,
    position: Any = None,
    remainder: Any = "keep",
    name: str = "valid",
) -> list[StreamShard]:
    spec = StreamSpec(name=name, schema=SCHEMA, remainder=remainder)
    return [
        StreamShard(
            spec,
            Parts(blocks, size, rank),
            Cursor(
                StreamPosition.from_plain(position, size)
                if position
                else StreamPosition(world_size=size)
            ),
            world_size=size,
            rank=rank,
        )
        for rank in range(size)
    ]


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


blocks = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(blocks=blocks, size=st.integers(1, 5), batch_size=st.integers(1, 15))
def test_every_row_once_in_equally_many_batches(
    blocks: list[int], size: int, batch_size: int
) -> None:
    read = [ids(one.iter_batches(batch_size=batch_size)) for one in world(blocks, size)]
    assert sorted(row for of_rank in read for batch in of_rank for row in batch) == list(
        range(sum(blocks))
    )
    assert len({len(of_rank) for of_rank in read}) == 1
    sizes = [len(batch) for of_rank in read for batch in of_rank]
    assert max(sizes, default=0) <= batch_size


@given(
    blocks=blocks,
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    batch_size=st.integers(1, 15),
    steps=st.integers(0, 4),
)
def test_it_goes_on_on_any_number_of_workers(
    blocks: list[int], sizes: list[int], batch_size: int, steps: int
) -> None:
    consumed: list[int] = []
    position: Any = None
    for size in sizes:
        shards = world(blocks, size, position)
        iterators = [iter(one.iter_batches(batch_size=batch_size)) for one in shards]
        last = size is sizes[-1]
        for _ in range(1000 if size == sizes[-1] and last else steps):
            for iterator in iterators:
                consumed += next(iterator, {"id": pa.array([])})["id"].tolist()
        position = shards[0].cursor.position.to_plain()
        if position["epoch"] > 0:
            break
    if position["epoch"] > 0:
        assert sorted(consumed) == list(range(sum(blocks)))
    else:
        assert len(set(consumed)) == len(consumed)


@given(blocks=blocks, size=st.integers(1, 5), batch_size=st.integers(1, 15))
def test_dropping_and_padding_give_full_batches(
    blocks: list[int], size: int, batch_size: int
) -> None:
    dropped, padded = (
        [ids(one.iter_batches(batch_size=batch_size)) for one in world(blocks, size, None, how)]
        for how in ("drop", "pad")
    )
    assert {len(batch) for of_rank in dropped for batch in of_rank} <= {batch_size}
    assert len({len(of_rank) for of_rank in dropped}) == 1
    assert {row for of_rank in padded for batch in of_rank for row in batch} == set(
        range(sum(blocks))
    )
    # A rank without any row has nothing to pad with.
    some = [of_rank for of_rank in padded if any(of_rank)]
    assert {len(batch) for of_rank in some for batch in of_rank} <= {batch_size}


def test_each_iteration_is_an_epoch_and_the_whole_is_apart() -> None:
    [one] = world([5, 5], 1)
    first, second = (ids(one.iter_batches(batch_size=4)) for _ in range(2))
    assert [*chain(*first)] == [*chain(*second)] == list(range(10))
    assert one.to_arrow().column("id").to_pylist() == list(range(10))
    assert one.cursor.position.epoch == 2


def test_batches_made_before_the_loop_over_epochs_are_an_epoch_in_each() -> None:
    [one] = world([5, 5], 1)
    batches = one.iter_batches(batch_size=4)
    assert [[*chain(*ids(batches))] for _ in range(3)] == [list(range(10))] * 3
    assert one.cursor.position.epoch == 3


def test_the_gradient_weight_is_that_of_the_last_uneven_batch() -> None:
    shards = world([3], 2)
    weights = [[one.gradient_weight for _ in one.iter_batches(batch_size=8)] for one in shards]
    assert weights == [[2 * 2 / 3], [1 * 2 / 3]]


def test_what_nobody_knows_is_refused_with_the_way_out() -> None:
    [one] = world([5], 1)
    for ask in (
        lambda: len(one),
        lambda: one.num_batches(batch_size=2),
        lambda: len(one.iter_batches(batch_size=2)),
    ):
        with pytest.raises(TypeError, match=r"'valid' streams.*materialize"):
            ask()


@given(blocks=blocks, size=st.integers(1, 5), global_size=st.integers(1, 20))
def test_a_global_batch_that_workers_do_not_divide(
    blocks: list[int], size: int, global_size: int
) -> None:
    """After the loss of one of four, for instance."""
    read = [ids(one.iter_batches(global_batch_size=global_size)) for one in world(blocks, size)]
    assert sorted(chain(*chain(*read))) == list(range(sum(blocks)))
    assert len({len(of_rank) for of_rank in read}) == 1
    largest = max(-(-global_size // size), 1)
    assert all(len(batch) <= largest for of_rank in read for batch in of_rank)
    # On average it is the size that was asked for, from the first batch on.
    rows = 0
    for number, batch in enumerate(read[0][:-2] if global_size >= size else [], start=1):
        rows += len(batch)
        assert number * global_size - size < rows * size <= number * global_size


class Once(Parts):
    """Parts that come once, as from the pipeline's actor."""

    def __init__(self, blocks: Sequence[int], world_size: int, rank: int) -> None:
        super().__init__(blocks, world_size, rank)
        self.taken: set[tuple[int, int]] = set()

    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        part = super().next_part(epoch, index)
        assert isinstance(part, int) or (epoch, index) not in self.taken, "has it already"
        self.taken.add((epoch, index))
        return part


def alone(parts: PartSource) -> StreamShard:
    return StreamShard(
        StreamSpec(name="train", schema=SCHEMA, remainder="keep"),
        parts,
        Cursor(StreamPosition(world_size=1)),
        world_size=1,
        rank=0,
    )


@pytest.mark.parametrize("looked_at", [1, 2, 3])
def test_batches_that_were_looked_at_come_again(looked_at: int) -> None:
    """As with `dataset.take(1)` of TensorFlow's before training."""
    one = alone(Once([5, 5, 5], 1, 0))
    for _ in range(2):
        ahead = one.iter_ahead(batch_size=4)
        seen = [next(ahead)["id"].tolist() for _ in range(looked_at)]
        assert seen[0] == [0, 1, 2, 3]
    for _ in range(2):
        rows: list[int] = []
        trained = one.iter_ahead(batch_size=4)
        for batch in trained:
            rows += batch["id"].tolist()
            trained.used()
        assert rows == list(range(15))
    assert one.cursor.position.epoch == 2


class Slow(Parts):
    """The second part of the first epoch comes once the test wants it."""

    def __init__(self) -> None:
        super().__init__([5, 5], 1, 0)
        self.is_fetching, self.goes_on = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def begin(self, epoch: int, segments: Sequence[Segment]) -> None:
        self.calls.append(f"begin {epoch}")
        super().begin(epoch, segments)

    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        if (epoch, index) == (0, 1):
            self.is_fetching.set()
            assert self.goes_on.wait(timeout=60)
        self.calls.append(f"part {index} of {epoch}")
        return super().next_part(epoch, index)


def test_an_iterator_that_was_left_is_collected_while_a_part_is_being_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next epoch waits for it: nothing else may ask for parts meanwhile."""
    slow = Slow()
    one = alone(slow)
    batches = iter(one.iter_batches(batch_size=2))
    next(batches)
    assert slow.is_fetching.wait(timeout=60)
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, cycle
    collect_while_a_thread_starts(monkeypatch)
    rows: list[list[int]] = []
    loop = threading.Thread(target=lambda: rows.extend(ids(one.iter_batches(batch_size=5))))
    loop.start()
    slow.goes_on.set()
    loop.join(timeout=60)
    assert rows == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert slow.calls[:4] == ["begin 0", "part 0 of 0", "part 1 of 0", "begin 1"]


@pytest.mark.parametrize(
    ("read", "begins"),
    [
        (lambda one: ids(one.iter_batches(batch_size=10)), "begin 1"),
        (lambda one: ids(one.iter_ahead(batch_size=10)), "begin 1"),
        (lambda one: [one.to_arrow()["id"].to_pylist()], "begin -1"),
    ],
)
def test_whatever_reads_next_waits_for_the_thread_of_a_loop_that_was_left(
    read: Callable[[StreamShard], list[list[int]]], begins: str
) -> None:
    """It would ask for parts of an epoch that all ranks have left."""
    slow = Slow()
    one = alone(slow)
    batches = iter(one.iter_batches(batch_size=2, prefetch_batches=1))
    next(batches)
    assert slow.is_fetching.wait(timeout=60)
    batches.close()  # type: ignore[attr-defined]  # a for loop that is left closes it
    rows: list[list[int]] = []
    reading = threading.Thread(target=lambda: rows.extend(read(one)))
    reading.start()
    slow.goes_on.set()
    reading.join(timeout=60)
    assert rows == [[*range(10)]]
    assert not [each for each in slow.calls[slow.calls.index(begins) :] if each.endswith("of 0")]


def test_a_lost_stream_is_raised_in_the_loop() -> None:
    class Lost(Parts):
        def next_part(self, epoch: int, index: int) -> pa.Table | int:
            if index == 1:
                raise StreamLostError("the map function raised ValueError: 7")
            return super().next_part(epoch, index)

    one = alone(Lost([5, 5], 1, 0))
    with pytest.raises(StreamLostError, match="ValueError: 7"):
        list(one.iter_batches(batch_size=2))


@pytest.mark.parametrize("remainder", ["keep", "pad", "drop"])
@pytest.mark.parametrize("blocks", [[0], [1], [1, 0, 1]])
def test_fewer_rows_to_train_on_than_ranks_are_refused_on_every_rank(
    blocks: list[int], remainder: str
) -> None:
    """As they are for data sets whose rows are counted before the start."""
    rows = {0: "0 rows", 1: "1 row", 2: "2 rows"}[sum(blocks)]
    found = f"its {rows} can't be divided among 3 workers"
    for shard in world(blocks, 3, remainder=remainder, name="train"):
        with pytest.raises(BadDataError, match=found):
            list(shard.iter_batches(batch_size=2))


def test_as_many_rows_to_train_on_as_ranks_are_enough() -> None:
    assert [ids(one.iter_batches(batch_size=2)) for one in world([3], 3, name="train")] == [
        [[0]],
        [[1]],
        [[2]],
    ]
