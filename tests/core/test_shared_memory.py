"""Tables in memory that several processes map."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from polytrain.data.shared_memory import from_shared_memory, to_shared_memory

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
    del mapped
    assert set(os.listdir("/proc/self/fd")) <= before
