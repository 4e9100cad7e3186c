"""The stream of a Ray dataset, on a real Ray: rows, order, failures, restarts, what is freed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
from tests.own_ray import own_ray
from tests.sweeps import only_in_sweep

from polytrain.data.plan.stream_partitioner import Segment
from polytrain.data.read.describe import describe
from polytrain.data.read.ray_data import cpu_shortage, from_ray_data, stream_schema
from polytrain.data.types.columns import column_to_numpy
from polytrain.data_errors import ReadError, SourceError
from polytrain.workers.ray.streams import (
    End,
    RayStream,
    StreamError,
    read_part,
    start_stream,
)

ROWS = 103
"""A prime number: no world size divides it."""

CPUS = 2

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    # One that other tests of this process have begun may not be as empty as these need it.
    ray.shutdown()
    with own_ray(num_cpus=CPUS):
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        ray.data.DataContext.get_current().enable_progress_bars = False
        Ranks.shared = ray.remote(num_cpus=0)(Streams).remote()
        yield
        del Ranks.shared


@pytest.fixture(autouse=True)
def _end_streams() -> Iterator[None]:
    yield
    ray.get(Ranks.shared.end.remote())


class Streams:
    """Several streams in one process: an actor for each would take seconds to start."""

    def __init__(self) -> None:
        self._streams: dict[int, RayStream] = {}

    async def start(self, number: int, dataset: Any, held: Mapping[str, float]) -> None:
        self._streams[number] = RayStream("train", dataset, held, notice_after_s=1)

    async def begin(self, number: int, *arguments: Any) -> None:
        await self._streams[number].begin(*arguments)

    async def next_part(self, number: int, *arguments: Any) -> Any:
        return await self._streams[number].next_part(*arguments)

    async def end(self) -> None:
        for stream in self._streams.values():
            for epoch in stream._epochs.values():
                for rank in tuple(epoch._ranks):
                    epoch.leave(rank)
        self._streams.clear()


class Ranks:
    """What the agents of a run do with a stream."""

    shared: Any
    """The actor that has the streams of all tests."""

    _numbers = count()

    def __init__(self, dataset: Any, held: Mapping[str, float] | None = None) -> None:
        number = next(self._numbers)
        ray.get(self.shared.start.remote(number, dataset, held or {}))
        self._begin = partial(self.shared.begin.remote, number)
        self._next_part = partial(self.shared.next_part.remote, number)

    def begin(self, *, epoch: int = 0, segments: tuple[Segment, ...] = (), world_size: int) -> None:
        ray.get(self._begin(epoch, segments, world_size))

    def ask(self, rank: int, index: int, *, epoch: int = 0) -> Any:
        return self._next_part(epoch, rank, index)

    def rest(
        self,
        rank: int,
        *,
        epoch: int = 0,
        first: int = 0,
        schema: pa.Schema = SCHEMA,
    ) -> tuple[pa.Table, End]:
        """All that is left of the epoch for one rank."""
        tables = [schema.empty_table()]
        for index in count(first):
            part = ray.get(self.ask(rank, index, epoch=epoch))
            if isinstance(part, End):
                break
            tables.append(read_part(part, schema))
        return pa.concat_tables(tables), part

    def epoch(
        self,
        world_size: int,
        *,
        segments: tuple[Segment, ...] = (),
        epoch: int = 0,
    ) -> list[list[int]]:
        """The ids that each rank gets."""
        self.begin(epoch=epoch, segments=segments, world_size=world_size)
        shards = [self.rest(rank, epoch=epoch)[0] for rank in range(world_size)]
        return [shard.column("id").to_pylist() for shard in shards]


class RanksOfActor(Ranks):
    """Those of a stream that has an actor of its own, as in a run."""

    def __init__(self, dataset: Any, held: Mapping[str, float] | None = None) -> None:
        self.actor = start_stream("train", dataset, held or {}, notice_after_s=1)
        self._begin = self.actor.begin.remote
        self._next_part = self.actor.next_part.remote


def unlike(batch: dict[str, Any]) -> dict[str, Any]:
    """Takes longer the earlier it is in the order."""
    time.sleep(0.3 if batch["id"][0] < 20 else 0)
    return batch


def numbers() -> Any:
    return ray.data.range(ROWS, override_num_blocks=13).map_batches(lambda batch: batch)


def numbers_out_of_order() -> Any:
    return ray.data.range(ROWS, override_num_blocks=13).map_batches(unlike)


def shuffled() -> Any:
    return numbers().random_shuffle(seed=3)


def filtered() -> Any:
    return numbers().filter(lambda row: row["id"] % 10 < 3)


def items() -> Any:
    return ray.data.from_items([{"id": row} for row in range(ROWS)], override_num_blocks=7)


def frames() -> Any:
    whole = pd.DataFrame({"id": range(ROWS)})
    return ray.data.from_pandas([whole[:50], whole[50:51], whole[51:]])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "make",
    [
        only_in_sweep(numbers_out_of_order),
        shuffled,
        only_in_sweep(filtered),
        only_in_sweep(items),
        frames,
    ],
)
def test_every_row_reaches_one_rank_and_the_epoch_goes_on_anywhere(make: Any) -> None:
    dataset = make()
    expected = Counter(row["id"] for row in dataset.take_all())
    # Each restart has the actor that the attempt before it didn't have.
    one, other = RanksOfActor(dataset), Ranks(dataset)
    whole = one.epoch(3)
    assert Counter(chain(*whole)) == expected
    assert max(map(len, whole)) - min(map(len, whole)) <= 1

    # The same world resumes as if nothing had happened; another one gets the remaining rows.
    assert other.epoch(3, segments=(Segment(3, 4),)) == [rank[4:] for rank in whole]
    consumed = [row for rank in whole for row in rank[:4]]
    half = other.epoch(2, epoch=1, segments=(Segment(3, 4),))
    consumed += [row for rank in half for row in rank[:5]]
    rest = one.epoch(4, epoch=1, segments=(Segment(3, 4), Segment(2, 5)))
    assert Counter(chain(consumed, *rest)) == expected


def test_blocks_come_in_order_whichever_is_ready_first() -> None:
    assert Ranks(numbers_out_of_order()).epoch(1) == [list(range(ROWS))]


def test_files_come_in_order(tmp_path: Path) -> None:
    for file in range(4):
        rows = range(file * 1000, file * 1000 + 100)
        pq.write_table(pa.table({"id": rows}), tmp_path / f"{file}.parquet", row_group_size=30)
    dataset = ray.data.read_parquet(str(tmp_path))
    assert stream_schema(dataset) == SCHEMA
    ids = Ranks(dataset).epoch(1)[0]
    assert ids == sorted(ids)
    assert len(ids) == 400


def test_a_reseeding_shuffle_depends_on_the_epoch_alone() -> None:
    seed = ray.data.RandomSeedConfig(seed=3)
    dataset = ray.data.range(ROWS, override_num_blocks=4).random_shuffle(seed=seed)
    stream = Ranks(dataset)
    first, second = stream.epoch(2), stream.epoch(2, epoch=1)
    assert first != second
    # A restart begins to count anew.
    assert RanksOfActor(dataset).epoch(2, epoch=1) == second


def test_the_users_dataset_is_left_as_it_was() -> None:
    dataset = numbers()
    before = dataset.context.execution_options
    options = (before.preserve_order, before.resource_limits)
    Ranks(dataset, {"CPU": 1}).epoch(2)
    after = dataset.context.execution_options
    assert (after.preserve_order, after.resource_limits) == options


# `test_every_row_reaches_one_rank` also reads one rank after the other.
@pytest.mark.only_in_sweep
def test_ranks_go_at_their_own_pace() -> None:
    stream = Ranks(numbers())
    stream.begin(world_size=2)
    fast, end = stream.rest(0)
    assert end == End(ROWS)
    slow, _ = stream.rest(1)
    assert (len(fast), len(slow)) == (52, 51)


def test_an_epoch_may_begin_while_another_is_read() -> None:
    stream = Ranks(numbers())
    stream.begin(world_size=2)
    stream.begin(world_size=2, epoch=1)
    assert ray.get(stream.ask(0, 0))
    # Rank 0 breaks off the epoch; rank 1 still reads it.
    assert stream.rest(0, epoch=1)[1] == End(ROWS)
    assert stream.rest(1)[1] == End(ROWS)
    assert stream.rest(1, epoch=1)[1] == End(ROWS)


def test_what_a_function_raises_reaches_every_rank_after_its_rows() -> None:
    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] == 6:
            raise ValueError("the sensor says no")
        return batch

    stream = Ranks(ray.data.range(10, override_num_blocks=5).map_batches(fail))
    stream.begin(world_size=2)
    for rank in range(2):
        with pytest.raises(
            StreamError, match=r"ValueError: the sensor says no \(.*, in fail\): "
        ) as caught:
            stream.rest(rank)
        assert "in fail" in str(caught.value)


def stuck(directory: Path) -> Any:
    """All CPUs are held by functions that don't return; unless freed."""

    def hold(batch: dict[str, Any]) -> dict[str, Any]:
        (directory / str(batch["id"][0])).touch()
        if not (directory / "free").exists():
            time.sleep(600)
        return batch

    return ray.data.range(50, override_num_blocks=5).map_batches(hold)


def wait_until_stuck(directory: Path, waiting: Any) -> None:
    while len(list(directory.iterdir())) < CPUS:
        ray.wait([waiting], timeout=0.1)
    (directory / "free").touch()


@pytest.mark.sweep
@pytest.mark.parametrize("shuffles", [only_in_sweep(False), True])
def test_a_killed_actor_ends_what_runs(tmp_path: Path, shuffles: bool) -> None:
    """As at the end of an attempt: the next one has an actor of its own."""
    dataset = stuck(tmp_path)
    if shuffles:
        dataset = dataset.random_shuffle()
    stream = RanksOfActor(dataset)
    stream.begin(world_size=1)
    waiting = stream.ask(0, 0)
    wait_until_stuck(tmp_path, waiting)
    ray.kill(stream.actor)
    assert len(list(chain(*Ranks(dataset).epoch(2)))) == 50
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)


def test_blocks_are_freed_as_they_are_read_and_made_as_they_are_wanted(tmp_path: Path) -> None:
    def large(batch: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / str(batch["id"][0])).touch()
        return {"id": batch["id"], "x": np.ones((len(batch["id"]), 8 << 20), np.uint8)}

    blocks, most = 60, 20
    free = ray.available_resources()["object_store_memory"]
    dataset = ray.data.range(blocks, override_num_blocks=blocks).map_batches(large)
    dataset.context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(
        object_store_memory=most * (8 << 20)
    )
    stream = RanksOfActor(dataset)
    stream.begin(world_size=1)
    for index in range(30):
        assert len(ray.get(stream.ask(0, index))) == 1
        # What is in the store, what running tasks have begun, and what was taken.
        assert len(list(tmp_path.iterdir())) <= most + CPUS + index + 1
        assert free - ray.available_resources()["object_store_memory"] < (most + 10) * (8 << 20)
    assert len(stream.rest(0, first=30)[0]) == blocks - 30
    ray.kill(stream.actor)


def test_parts_have_the_columns_and_types_that_are_asked_for() -> None:
    def wide(batch: dict[str, Any]) -> pd.DataFrame:
        ids = batch["id"]
        # A DataFrame's block has a type of its own where it holds nothing.
        return pd.DataFrame({"y": [None if n < 9 else f"{n}" for n in ids], "id": ids, "z": 0})

    dataset = ray.data.range(12, override_num_blocks=4).map_batches(wide)
    schema = pa.schema([("id", pa.int64()), ("y", pa.string())])
    stream = Ranks(dataset)
    stream.begin(world_size=1)
    table, _ = stream.rest(0, schema=schema)
    assert table.schema == schema
    assert table.column("y").to_pylist() == [None] * 9 + ["9", "10", "11"]


def test_tensors_need_no_ray_to_be_read() -> None:
    dataset = ray.data.range_tensor(10, shape=(2, 3), override_num_blocks=4)
    schema = stream_schema(dataset)
    stream = Ranks(dataset)
    stream.begin(world_size=1)
    part = ray.get(stream.ask(0, 1))
    tensors = column_to_numpy(read_part(part, schema).column("data"))
    first = tensors[0, 0, 0]
    assert np.array_equal(tensors[:, 1, 2], range(first, first + len(tensors)))
    assert tensors.shape == (len(part[0]), 2, 3)
    assert read_part((), schema).schema == schema


def ragged(batch: dict[str, Any]) -> dict[str, Any]:
    """Tensors of one shape in each block, and another in the next."""
    return {"x": np.stack([np.full((2, 1 + row // 5), row) for row in batch["id"]])}


def test_tensors_of_different_shapes_are_nested_lists() -> None:
    rows = [{"x": np.full((2, n + 1), n)} for n in range(6)]
    within_blocks = ray.data.from_items(rows, override_num_blocks=2)
    across_blocks = ray.data.range(10, override_num_blocks=2).map_batches(ragged, batch_size=5)
    lists = pa.large_list(pa.large_list(pa.int64()))
    for dataset, widths in ((within_blocks, range(1, 7)), (across_blocks, [1] * 5 + [2] * 5)):
        pieces = from_ray_data(dataset.materialize(), None)
        assert pieces.schema == pa.schema([("x", lists)])
        table = pa.concat_tables([piece.read(0, piece.rows) for piece in pieces.pieces])
        assert [row.shape for row in column_to_numpy(table["x"])] == [(2, w) for w in widths]
    assert stream_schema(within_blocks) == pa.schema([("x", lists)])
    stream = Ranks(within_blocks)
    stream.begin(world_size=1)
    table, _ = stream.rest(0, schema=pa.schema([("x", lists)]))
    assert [np.shape(row) for row in table["x"].to_pylist()] == [(2, n + 1) for n in range(6)]


def test_another_shape_than_the_first_rows_is_reported_with_the_remedy() -> None:
    dataset = ray.data.range(10, override_num_blocks=2).map_batches(ragged, batch_size=5)
    stream = Ranks(dataset)
    stream.begin(world_size=1)
    with pytest.raises(ReadError, match=r"'x' .*shape is \(2, 2\).*dataset\.materialize\(\)"):
        stream.rest(0, schema=stream_schema(dataset))


def blocks(*columns: Any) -> Any:
    """A stream with these values of "x", block by block."""
    tables = [pa.table({"x": column}) for column in columns]
    return ray.data.from_arrow(tables).map_batches(
        lambda table: table, batch_format="pyarrow", batch_size=None
    )


def test_a_column_without_values_in_the_first_rows_has_its_type_from_later_ones() -> None:
    dataset = blocks(pa.nulls(2), [None], [3, 4])
    schema = stream_schema(dataset)
    assert schema == pa.schema([("x", pa.int64())])
    assert from_ray_data(dataset.materialize(), None).schema.types == schema.types
    stream = Ranks(dataset)
    stream.begin(world_size=1)
    table, _ = stream.rest(0, schema=schema)
    assert table["x"].to_pylist() == [None, None, None, 3, 4]
    assert stream_schema(blocks(pa.nulls(2))) == pa.schema([("x", pa.null())])


def test_types_with_nothing_in_common_are_an_error_streamed_or_not() -> None:
    dataset = blocks(["a"], [1])
    with pytest.raises(SourceError, match="'x' is string in block 0 and int64 in block 1"):
        from_ray_data(dataset.materialize(), None)
    stream = Ranks(dataset)
    stream.begin(world_size=1)
    with pytest.raises(ReadError, match=r"'x' as int64.*type string.*dataset\.materialize\(\)"):
        stream.rest(0, schema=stream_schema(dataset))


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("name", [None, "key"])
def test_an_index_of_pandas_is_no_column(is_computed: bool, name: str | None) -> None:
    frame = pd.DataFrame({"x": [1, 2]}, index=pd.Index([5, 6], name=name))
    dataset = ray.data.from_arrow(pa.Table.from_pandas(frame))
    dataset = dataset.map_batches(lambda table: table, batch_format="pyarrow")
    source = describe("train", dataset.materialize() if is_computed else dataset)
    assert source.info.columns == ("x",)
    assert source.index == (name or "__index_level_0__",)


def test_columns_of_python_objects_are_refused_before_the_start() -> None:
    def mixed(batch: dict[str, Any]) -> pd.DataFrame:
        return pd.DataFrame({"id": batch["id"], "x": [1, "NA"]})

    dataset = ray.data.range(2, override_num_blocks=1).map_batches(mixed)
    for data in (dataset, dataset.materialize()):
        with pytest.raises(SourceError, match="'x' holds Python objects") as caught:
            describe("train", data)
        assert "columns=[…]" in caught.value.remedy
        assert describe("train", data, columns=["id"]).schema.names == ["id"]


def test_a_schema_costs_as_little_as_it_can(tmp_path: Path) -> None:
    def spy(batch: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / str(batch["id"][0])).touch()
        return {**batch, "y": batch["id"] / 2}

    assert stream_schema(ray.data.range(8)) == SCHEMA
    mapped = ray.data.range(400, override_num_blocks=400).map_batches(spy)
    assert stream_schema(mapped) == pa.schema([("id", pa.int64()), ("y", pa.float64())])
    assert len(list(tmp_path.iterdir())) < 100


def test_a_pipeline_without_rows_or_with_a_failure_has_no_schema() -> None:
    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("the sensor says no")

    with pytest.raises(SourceError, match="no rows"):
        stream_schema(ray.data.range(8).map_batches(lambda batch: {"id": batch["id"][:0]}))
    with pytest.raises(SourceError, match="ValueError: the sensor says no"):
        stream_schema(ray.data.range(8).map_batches(fail))


def test_no_spare_cpu_is_reported() -> None:
    assert cpu_shortage(numbers(), {"CPU": 3}, 4) is None
    shortage = cpu_shortage(numbers(), {"CPU": 4}, 4)
    assert shortage is not None
    assert "hold 4 of the cluster's 4" in shortage
    assert cpu_shortage(items(), {"CPU": 4}, 4) is None


def test_waiting_for_a_cpu_is_reported_and_ends_when_there_is_one() -> None:
    @ray.remote(num_cpus=CPUS)
    class Greedy:
        def ready(self) -> None: ...

    greedy = Greedy.remote()
    ray.get(greedy.ready.remote())
    stream = RanksOfActor(
        ray.data.range(ROWS, override_num_blocks=4).map_batches(lambda b: b), {"CPU": CPUS}
    )
    notices = stream.actor.notices.options(num_returns="streaming").remote()
    stream.begin(world_size=1)
    waiting = stream.ask(0, 0)
    assert "no CPU of the cluster is free" in ray.get(next(notices))
    ray.kill(greedy)
    assert ray.get(waiting)
    ray.kill(stream.actor)
