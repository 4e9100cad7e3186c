"""Tables in memory that several processes map."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polytrain.data.shards.shared_memory import (
    from_shared_memory,
    parts_to_shared_memory,
    to_shared_memory,
)
from polytrain.data.types.columns import column_to_numpy
from polytrain.data.types.nested import tensors_of
from polytrain.data_errors import ReadError

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


PLAIN = {
    "small": pa.int8(),
    "number": pa.float32(),
    "flag": pa.bool_(),
    "time": pa.timestamp("us"),
}


@contextmanager
def shared(table: pa.Table) -> Iterator[pa.Table]:
    """The table as another process maps it."""
    with behind(to_shared_memory(table)) as mapped:
        yield mapped


@contextmanager
def behind(descriptor: int) -> Iterator[pa.Table]:
    try:
        yield from_shared_memory(descriptor)
    finally:
        os.close(descriptor)


PARTS = st.lists(st.lists(st.none() | st.integers(0, 1), max_size=20), max_size=4)


def of_plain_columns(values: list[int | None]) -> pa.Table:
    numbers = pa.array(values, pa.int64())
    return pa.table({name: numbers.cast(kind) for name, kind in PLAIN.items()})


def test_a_table_survives_shared_memory() -> None:
    with shared(TABLE) as mapped:
        assert mapped.equals(TABLE)


TENSORS = tensors_of(np.arange(40, dtype=np.int16).reshape(10, 2, 2))
FLAGS = tensors_of(np.arange(40).reshape(10, 2, 2) % 3 == 0)


def within(table: pa.Table) -> pa.Table:
    """The rows as structs."""
    return pa.table({"row": table.combine_chunks().to_struct_array().chunk(0)})


@pytest.mark.parametrize("tensors", [TENSORS, FLAGS], ids=["numbers", "booleans"])
@pytest.mark.parametrize("missing", [[], [0, 7]])
def test_tensors_are_laid_out_part_by_part(tensors: pa.Array, missing: list[int]) -> None:
    rows = pa.array([None if row in missing else row for row in range(10)])
    tensors = pa.ExtensionArray.from_storage(tensors.type, tensors.storage.take(rows))
    table = pa.table({"id": range(10), "x": tensors})
    with behind(parts_to_shared_memory(iter([within(table)]), within(table).schema, 10)) as mapped:
        assert mapped.equals(within(table))
    parts = [table.slice(0, 3), table.slice(3, 0), table.slice(3, 6), table.slice(9)]
    with behind(parts_to_shared_memory(iter(parts), table.schema, 10)) as mapped:
        assert mapped.equals(table)
        assert mapped.column("x").num_chunks == 1
        found = column_to_numpy(mapped.column("x"))
        assert [None if row is None else row.tolist() for row in found] == [
            None if row is None else row.tolist() for row in column_to_numpy(table.column("x"))
        ]


def test_tensors_that_lack_numbers_are_an_error() -> None:
    storage = pa.array([[1, None], [3, 4]], pa.list_(pa.int64(), 2))
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int64(), (2,)), storage)
    table = pa.table({"x": tensors})
    with pytest.raises(ReadError, match="lacks some of its numbers"):
        parts_to_shared_memory(iter([table]), table.schema, 2)


def test_parts_with_strings_are_freed_as_they_are_put_together() -> None:
    """In use, besides what is shared: what was read, and one column of it once more."""
    names = ["a", "b", "c", "d"]

    def parts() -> Iterator[pa.Table]:
        for _ in range(10):
            yield pa.table({name: pa.array(["x" * 100] * 10_000) for name in names})

    schema = pa.schema([(name, pa.string()) for name in names])
    size = 10 * 4 * 10_000 * 104
    usual = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counting)
    try:
        descriptor = parts_to_shared_memory(parts(), schema, 100_000)
    finally:
        pa.set_memory_pool(usual)
    assert size < counting.max_memory() < 1.5 * size
    with behind(descriptor) as table:
        assert table.num_rows == 100_000
        assert table.column("d")[99_999].as_py() == "x" * 100


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


@given(PARTS)
@example([[0, 1, 1], [1, None, 0, 1]])
def test_parts_become_one_table(parts: list[list[int | None]]) -> None:
    """Whatever is missing, and wherever in a byte a part begins."""
    whole = of_plain_columns([value for part in parts for value in part])
    # The first row of each part belongs to another, as in a slice of a row group.
    tables = [of_plain_columns([0, *part]).slice(1) for part in parts]
    with behind(parts_to_shared_memory(iter(tables), whole.schema, len(whole))) as mapped:
        assert mapped.equals(whole)
        assert [column.null_count for column in mapped.columns] == [
            column.null_count for column in whole.columns
        ]
        assert all(column.num_chunks == 1 for column in mapped.columns)


def test_parts_with_words_become_one_table() -> None:
    parts = [TABLE.slice(0, 4), TABLE.slice(4)]
    with behind(parts_to_shared_memory(iter(parts), TABLE.schema, ROWS)) as mapped:
        assert mapped.equals(TABLE)


def test_a_part_of_narrower_numbers_is_widened() -> None:
    schema = pa.schema({"x": pa.int64()})
    part = pa.table({"x": pa.array([1, 2], pa.int8())})
    with behind(parts_to_shared_memory(iter([part]), schema, 2)) as mapped:
        assert mapped.to_pydict() == {"x": [1, 2]}


def test_parts_that_cannot_be_read_leave_nothing_behind() -> None:
    def parts() -> Iterator[pa.Table]:
        yield of_plain_columns([0])
        raise OSError("the file is gone")

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="is gone"):
        parts_to_shared_memory(parts(), of_plain_columns([]).schema, 2)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_table_for_which_there_is_no_memory_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.ipc.new_file", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        to_shared_memory(TABLE)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_the_memory_is_gone_with_its_last_user() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with shared(TABLE) as mapped:
        assert mapped.num_rows == ROWS
    del mapped
    assert set(os.listdir("/proc/self/fd")) <= before
