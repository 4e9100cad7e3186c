"""A shard in a trainer: its rows in shared memory, and its batches in every format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.data.assignment import assign, read
from polytrain.data.reader import TableShard, from_shared_memory, to_shared_memory
from polytrain.data.sources import describe

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


@contextmanager
def shared(table: pa.Table) -> Iterator[pa.Table]:
    """The table as another process maps it."""
    descriptor = to_shared_memory(table)
    try:
        yield from_shared_memory(descriptor)
    finally:
        os.close(descriptor)


def shard(data: Any = TABLE, *, world_size: int = 1, rank: int = 0) -> TableShard:
    assignment = assign(describe("train", data), world_size, rank, whole=False)
    return TableShard(read(assignment), assignment.info)


def test_a_table_survives_shared_memory() -> None:
    with shared(TABLE) as mapped:
        assert mapped.equals(TABLE)


def test_a_table_without_rows_survives_shared_memory() -> None:
    with shared(TABLE.slice(0, 0)) as mapped:
        assert mapped.schema == TABLE.schema
        assert mapped.num_rows == 0


def test_a_shard_in_the_middle_survives_shared_memory() -> None:
    with shared(TABLE.slice(3, 4)) as mapped:
        assert mapped.to_pydict() == TABLE.slice(3, 4).to_pydict()


def test_categories_that_differ_between_files_survive_shared_memory() -> None:
    """What pandas writes as a categorical column has a dictionary of its own in each file."""
    parts = [pa.table({"c": pa.array(list(part)).dictionary_encode()}) for part in ("ab", "bc")]
    with shared(pa.concat_tables(parts)) as mapped:
        assert mapped.column("c").to_pylist() == ["a", "b", "b", "c"]


def test_the_memory_is_gone_with_its_last_user() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with shared(TABLE) as mapped:
        assert mapped.num_rows == ROWS
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_shard_tells_its_rows_and_those_of_all() -> None:
    second = shard(world_size=3, rank=1)
    assert second.name == "train"
    assert second.total_rows == ROWS
    assert len(second) == second.to_arrow().num_rows == len(second.to_pandas())
    assert second.schema == TABLE.schema


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "arrow"])
def test_all_rows_come_in_every_format(batch_format: Any) -> None:
    kinds = {"numpy": dict, "pandas": pd.DataFrame, "arrow": pa.Table}
    batches = list(shard().iter_batches(batch_size=4, batch_format=batch_format))
    assert all(isinstance(batch, kinds[batch_format]) for batch in batches)
    numbers = [float(str(number)) for batch in batches for number in batch["number"]]
    assert numbers == list(range(ROWS))


def test_numpy_batches_keep_types_and_shapes() -> None:
    batches = list(shard().iter_batches(batch_size=4))
    assert {batch["number"].dtype for batch in batches} == {np.dtype(np.float32)}
    assert {batch["image"].shape[1:] for batch in batches} == {(2, 3)}
    images = np.concatenate([batch["image"] for batch in batches])
    np.testing.assert_array_equal(images, np.arange(ROWS * 6).reshape(ROWS, 2, 3))
    assert batches[-1]["word"][-1] == f"word {ROWS - 1}"


def test_an_empty_shard_has_batches_of_the_right_shape() -> None:
    """Two rows for three ranks: the one without rows keeps step with the others."""
    shards = [shard(TABLE.slice(0, 2), world_size=3, rank=rank) for rank in range(3)]
    batches = [list(one.iter_batches(batch_size=8)) for one in shards]
    assert [len(of_rank) for of_rank in batches] == [1, 1, 1]
    assert sorted(len(batch["image"]) for [batch] in batches) == [0, 1, 1]
    assert {batch["image"].shape[1:] for [batch] in batches} == {(2, 3)}


@given(rows=st.integers(1, 60), world_size=st.integers(1, 5), batch_size=st.integers(1, 20))
def test_ranks_take_equally_many_batches_of_all_rows(
    rows: int, world_size: int, batch_size: int
) -> None:
    data = pa.table({"id": np.arange(rows)})
    world = [
        [
            batch["id"].tolist()
            for batch in shard(data, world_size=world_size, rank=rank).iter_batches(
                batch_size=batch_size
            )
        ]
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in world}) == 1
    assert [row for batches in world for batch in batches for row in batch] == list(range(rows))
    sizes = [len(batch) for batches in world for batch in batches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_drop_last_gives_full_batches_only() -> None:
    batches = list(shard().iter_batches(batch_size=4, drop_last=True))
    assert [len(batch["number"]) for batch in batches] == [4, 4]


def test_a_shard_is_iterated_over_again_from_the_start() -> None:
    train = shard()
    first, second = ([b["number"].tolist() for b in train.iter_batches()] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_format": "torch"}, "batch_format='torch'.*numpy.*pandas.*arrow"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(
    arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        shard().iter_batches(**arguments)
