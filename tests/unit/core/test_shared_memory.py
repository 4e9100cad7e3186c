"""Tables in memory that several processes map."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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


def test_the_memory_is_gone_with_its_last_user() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with shared(TABLE) as mapped:
        assert mapped.num_rows == ROWS
    del mapped
    assert set(os.listdir("/proc/self/fd")) <= before
