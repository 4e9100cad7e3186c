"""A shard in a trainer: read as a whole, in batches of every format, from where a run stands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain import DataConfig
from polytrain.data.shards.assignment import RunDataset, holding
from polytrain.data.shards.groups import group_starts
from polytrain.data.shards.opening import open_shards
from polytrain.data.shards.reader import RowsShard
from polytrain.data.sources.describe import describe
from polytrain.testing.shards import shard_of

ROWS = 11
TABLE = pa.table(
    {
        "number": np.arange(ROWS, dtype=np.float32),
        "word": [f"word {row}" for row in range(ROWS)],
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3)
        ),
    }
)


def shard(data: Any = TABLE, **arguments: Any) -> RowsShard:
    return shard_of(data, **arguments)


def numbers(batches: Iterable[Any], column: str = "id") -> list[list[int]]:
    return [[int(value) for value in batch[column]] for batch in batches]


def files(directory: Path, rows: int = 1000, row_group_size: int = 64) -> str:
    directory.mkdir()
    for part, start in enumerate(range(0, rows, 300)):
        ids = np.arange(start, min(start + 300, rows))
        table = pa.table({"id": ids, "half": ids / 2})
        pq.write_table(table, directory / f"part-{part}.parquet", row_group_size=row_group_size)
    return str(directory)


# A shard as a whole


def test_a_shard_tells_its_rows_and_those_of_all() -> None:
    second = shard(world_size=3, rank=1)
    assert second.name == "train"
    assert second.total_rows == ROWS
    assert len(second) == second.to_arrow().num_rows == len(second.to_pandas())
    assert second.schema == TABLE.schema


@pytest.mark.parametrize("as_tables", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_of_files_are_all_rows_in_order(
    tmp_path: Path, world_size: int, as_tables: bool
) -> None:
    data = files(tmp_path / "data")
    for shards in (world_size, 4):
        tables = [
            shard(
                data, world_size=world_size, rank=rank, shards=shards, as_tables=as_tables
            ).to_arrow()
            for rank in range(world_size)
        ]
        ids = pa.concat_tables(tables).column("id").to_pylist()
        assert ids == list(range(1000))


# Batches


@pytest.mark.parametrize("name", ["format", "batch_format"])
@pytest.mark.parametrize("wanted", ["numpy", "pandas", "arrow"])
def test_all_rows_come_in_every_format(name: str, wanted: Any) -> None:
    kinds = {"numpy": dict, "pandas": pd.DataFrame, "arrow": pa.Table}
    batches = list(shard().iter_batches(batch_size=4, **{name: wanted}))
    assert all(isinstance(batch, kinds[wanted]) for batch in batches)
    found = [float(str(number)) for batch in batches for number in batch["number"]]
    assert found == list(range(ROWS))


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_numpy_batches_keep_types_and_shapes(shuffle: Any) -> None:
    batches = list(shard(shuffle=shuffle).iter_batches(batch_size=4))
    assert {batch["number"].dtype for batch in batches} == {np.dtype(np.float32)}
    assert {batch["image"].shape[1:] for batch in batches} == {(2, 3)}
    expected = np.arange(ROWS * 6).reshape(ROWS, 2, 3)
    for batch in batches:
        rows = batch["number"].astype(int)
        np.testing.assert_array_equal(batch["image"], expected[rows])
        assert batch["word"].tolist() == [f"word {row}" for row in rows]


@pytest.mark.parametrize("how", [{}, {"format": "arrow"}, {"prefetch_batches": 2}], ids=str)
def test_batches_made_before_the_loop_are_what_each_epoch_would_make(how: dict[str, Any]) -> None:
    """The orders of the epochs included."""
    data = pa.table({"id": np.arange(20)})
    early, late = shard(data, shuffle=True), shard(data, shuffle=True)
    batches = early.iter_batches(batch_size=6, **how)
    epochs = [numbers(batches) for _ in range(3)]
    assert epochs == [numbers(late.iter_batches(batch_size=6, **how)) for _ in range(3)]
    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(20))] * 3
    assert epochs[0] != epochs[1]
    assert early.cursor.position == late.cursor.position


def test_the_length_of_batches_is_a_whole_epochs() -> None:
    one = shard(pa.table({"id": np.arange(20)}))
    batches = one.iter_batches(batch_size=6)
    lengths = [len(batches), *(len(batches) for _ in batches), len(batches)]
    assert set(lengths) == {4}
    assert len(one.iter_batches(batch_size=6, drop_last=True)) == 3


def test_batches_made_before_the_loop_resume_in_the_middle_of_an_epoch() -> None:
    data = pa.table({"id": np.arange(20)})
    first = shard(data, shuffle=True)
    iterator = iter(first.iter_batches(batch_size=6))
    given = [next(iterator)["id"].tolist() for _ in range(2)]
    resumed = shard(data, shuffle=True, position=first.cursor.position.to_plain())
    batches = resumed.iter_batches(batch_size=6)
    assert len(batches) == 4
    rest, following = numbers(batches), numbers(batches)
    assert sorted(chain(*given, *rest)) == list(range(20))
    assert sorted(chain(*following)) == list(range(20))


def test_an_empty_shard_has_batches_of_the_right_shape() -> None:
    """Two rows for three ranks: the one without rows keeps step with the others."""
    shards = [shard(TABLE.slice(0, 2), world_size=3, rank=rank) for rank in range(3)]
    batches = [list(one.iter_batches(batch_size=8)) for one in shards]
    assert [len(of_rank) for of_rank in batches] == [1, 1, 1]
    assert sorted(len(batch["image"]) for [batch] in batches) == [0, 1, 1]
    assert {batch["image"].shape[1:] for [batch] in batches} == {(2, 3)}


@pytest.mark.parametrize("kind", ["memory", "files read ahead", "files held"])
@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_take_all_rows_in_equally_many_batches(
    tmp_path: Path, kind: str, shuffle: Any, world_size: int
) -> None:
    data = pa.table({"id": np.arange(1000)}) if kind == "memory" else files(tmp_path / "data")
    world = [
        numbers(
            shard(
                data,
                world_size=world_size,
                rank=rank,
                shards=2,
                shuffle=shuffle,
                as_tables=kind == "files held",
            ).iter_batches(global_batch_size=70)
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in world}) == 1
    assert sorted(row for batches in world for batch in batches for row in batch) == list(
        range(1000)
    )


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (3, 4), (4, 3)])
def test_iteration_goes_on_at_exactly_that_row_on_another_number_of_workers(
    tmp_path: Path, shuffle: Any, kind: str, sizes: tuple[int, int]
) -> None:
    data = pa.table({"id": np.arange(1000)}) if kind == "memory" else files(tmp_path / "data")
    before, after = sizes

    def world(size: int, position: Any = None) -> list[RowsShard]:
        return [
            shard(
                data,
                world_size=size,
                rank=rank,
                shards=before,
                shuffle=shuffle,
                position=position,
            )
            for rank in range(size)
        ]

    uninterrupted = [
        sorted(chain(*batch))
        for batch in zip(
            *(numbers(one.iter_batches(global_batch_size=90)) for one in world(before)),
            strict=True,
        )
    ]
    first = world(before)
    iterators = [iter(one.iter_batches(global_batch_size=90)) for one in first]
    for _ in range(4):
        for iterator in iterators:
            next(iterator)
    recorded = first[0].cursor.position.to_plain()
    assert all(one.cursor.position == first[0].cursor.position for one in first)
    resumed = [
        sorted(chain(*batch))
        for batch in zip(
            *(numbers(one.iter_batches(global_batch_size=90)) for one in world(after, recorded)),
            strict=True,
        )
    ]
    assert resumed == uninterrupted[4:]


def test_batches_that_were_prepared_ahead_do_not_count_as_given() -> None:
    data = pa.table({"id": np.arange(1000)})
    one = shard(data)
    batches = iter(one.iter_batches(batch_size=10, prefetch_batches=8))
    for _ in range(3):
        next(batches)
    assert one.cursor.position.start == 30


def test_an_epoch_is_over_when_its_last_batch_is_used() -> None:
    """Though nobody has asked whether there is another: a checkpoint may be made then."""
    one = shard(pa.table({"id": np.arange(20)}))
    batches = one.iter_ahead(batch_size=10)
    for _ in range(2):
        next(batches)
        batches.used()
    assert (one.cursor.position.epoch, one.cursor.position.start) == (1, 0)


def test_an_epoch_of_which_nothing_is_left_is_over_at_once() -> None:
    one = shard(pa.table({"id": np.arange(20)}))
    one.cursor.next_epoch().given(20)
    resumed = shard(pa.table({"id": np.arange(20)}), position=one.cursor.position.to_plain())
    assert [len([*resumed.iter_ahead(batch_size=10)]) for _ in range(2)] == [0, 2]


def test_prefetched_batches_are_the_same_ones() -> None:
    data = pa.table({"id": np.arange(1000)})
    plain, ahead = (
        numbers(shard(data, shuffle=True).iter_batches(batch_size=64, prefetch_batches=count))
        for count in (0, 3)
    )
    assert plain == ahead


def test_leaving_a_prefetching_loop_ends_its_thread() -> None:
    one = shard(pa.table({"id": np.arange(1000)}))
    batches = iter(one.iter_batches(batch_size=1, prefetch_batches=4))
    next(batches)
    batches.close()  # type: ignore[attr-defined]  # a for loop that is left closes it
    assert not [t for t in threading.enumerate() if t.name == "polytrain-prefetch"]


def test_an_error_while_preparing_is_raised_where_the_batch_is_missed() -> None:
    def fail_later(batch: Any) -> Any:
        if batch["id"][0] >= 20:
            raise RuntimeError("no more")
        return batch

    one = shard(pa.table({"id": np.arange(1000)}))
    batches = iter(one.iter_batches(batch_size=10, prefetch_batches=4, convert=fail_later))
    assert [int(next(batches)["id"][0]) for _ in range(2)] == [0, 10]
    with pytest.raises(RuntimeError, match="no more"):
        next(batches)


def test_the_gradient_weight_makes_the_mean_of_means_the_mean() -> None:
    """Canonical shards of 4, 4 and 3 rows on 2 workers: the shares differ."""
    data = pa.table({"id": np.arange(11)})
    world = [shard(data, world_size=2, rank=rank, shards=3) for rank in range(2)]
    batches = [iter(one.iter_batches(global_batch_size=11)) for one in world]
    [(ours, mine), (theirs, yours)] = [
        (float(np.mean(next(of_rank)["id"])), one.gradient_weight)
        for one, of_rank in zip(world, batches, strict=True)
    ]
    assert mine != yours
    assert (ours * mine + theirs * yours) / 2 == pytest.approx(np.mean(np.arange(11)))


# The remainder


@given(rows=st.integers(1, 60), world_size=st.integers(1, 5), batch_size=st.integers(1, 20))
def test_kept_rows_are_spread_evenly(rows: int, world_size: int, batch_size: int) -> None:
    data = pa.table({"id": np.arange(rows)})
    world = [
        numbers(shard(data, world_size=world_size, rank=rank).iter_batches(batch_size=batch_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in world}) == 1
    assert sorted(row for batches in world for batch in batches for row in batch) == list(
        range(rows)
    )
    assert max(len(batch) for batches in world for batch in batches) <= batch_size


@pytest.mark.parametrize("how", ["the data set's policy", "drop_last"])
def test_dropped_rows_are_counted(how: str, caplog: pytest.LogCaptureFixture) -> None:
    remainder = "drop" if how != "drop_last" else "keep"
    one = shard(remainder=remainder)
    with caplog.at_level(logging.WARNING):
        sizes = [
            len(batch["number"])
            for _ in range(2)
            for batch in one.iter_batches(batch_size=4, drop_last=how == "drop_last")
        ]
    assert sizes == [4, 4, 4, 4]
    assert one.num_batches(batch_size=4, drop_last=how == "drop_last") == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "'train' leaves out 3 of 11 rows" in told[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_padding_fills_the_last_batch(rank: int) -> None:
    one = shard(world_size=2, rank=rank, remainder="pad")
    assert [len(batch["number"]) for batch in one.iter_batches(batch_size=4)] == [4, 4]
    assert one.num_batches(batch_size=4) == 2


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_padding_of_files_begins_at_the_start_again(tmp_path: Path, shuffle: Any) -> None:
    data = files(tmp_path / "data")
    world = [
        shard(data, world_size=2, rank=rank, remainder="pad", shuffle=shuffle) for rank in range(2)
    ]
    batches = [numbers(one.iter_batches(batch_size=150)) for one in world]
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == [[150] * 4] * 2
    assert {row for of_rank in batches for batch in of_rank for row in batch} == set(range(1000))


# Groups


def grouped(sizes: list[int]) -> pa.Table:
    query = np.repeat(np.arange(len(sizes)), sizes)
    return pa.table({"query": query, "id": np.arange(len(query))})


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    world_size=st.integers(1, 5),
    shuffle=st.sampled_from([False, True, "window"]),
    batch_size=st.integers(1, 4),
)
def test_no_group_is_divided(
    sizes: list[int], world_size: int, shuffle: Any, batch_size: int
) -> None:
    source = describe("train", grouped(sizes))
    dataset = RunDataset(
        source=source,
        config=DataConfig(shuffle=shuffle, window_rows=3),
        group_starts=group_starts(source, "query"),
    )
    spec = dataset.spec(world_size=world_size, whole=False, as_tables=False, only_tables=False)
    table = holding(dataset, spec, world_size, 0).read()
    seen: list[int] = []
    whole: list[int] = []
    for rank in range(world_size):
        one = open_shards([spec], iter([table]), {}, world_size=world_size, rank=rank)["train"]
        whole += one.to_arrow().column("id").to_pylist()
        for batch in one.iter_batches(batch_size=batch_size):
            seen += batch["id"].tolist()
            for query in set(batch["query"].tolist()):
                assert (batch["query"] == query).sum() == sizes[query], "a group was divided"
            assert len(set(batch["query"].tolist())) <= batch_size
    assert sorted(seen) == whole == list(range(sum(sizes)))


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"batch_size": 2, "global_batch_size": 4}, "give one of them"),
        ({"batch_format": "torch"}, "batch_format='torch'.*numpy.*pandas.*arrow"),
        ({"format": "torch"}, "^format='torch'"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        shard().iter_batches(**arguments)


def test_memory_stays_at_a_few_row_groups(tmp_path: Path) -> None:
    """Of 667: the one that is in use, the one that is read ahead, and what is made of them."""
    one = shard(files(tmp_path / "data", rows=200_000, row_group_size=300), shuffle="window")
    row_group = 300 * 2 * 8
    before = most = pa.total_allocated_bytes()
    for _ in one.iter_batches(batch_size=100, batch_format="arrow"):
        most = max(most, pa.total_allocated_bytes())
    assert most - before < 6 * row_group
