"""The memory of batches: they may be written to, and nobody else sees it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.shards.rows import MappedRows

ROWS = 90
COLUMNS = {
    "id": pa.array(range(ROWS)),
    "half": pa.array(np.arange(ROWS) / 2),
    "gap": pa.array([None, 1, 2] * (ROWS // 3), pa.int32()),
    "hole": pa.array([None, 1.5, 2.5] * (ROWS // 3)),
    "truth": pa.array([True, False] * (ROWS // 2)),
    "word": pa.array([f"word {row}" for row in range(ROWS)]),
    "time": pa.array(range(ROWS), pa.timestamp("us")),
    "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3)
    ),
    "pair": pa.array([[row, row + 1] for row in range(ROWS)], pa.list_(pa.float32(), 2)),
    "tokens": pa.array([[row] * 3 for row in range(ROWS)], pa.list_(pa.int64())),
    "ragged": pa.array([[row] * (row % 3) for row in range(ROWS)], pa.list_(pa.int64())),
    "in ragged": pa.array([[[True]] * (row % 3) + [[False] * 2] for row in range(ROWS)]),
    "struct": pa.array([{"row": row} for row in range(ROWS)]),
    "words": pa.array([[str(row)] * (row % 3 + 1) for row in range(ROWS)]),
}
TABLE = pa.table(COLUMNS)
OF_CSV = TABLE.select(["id", "half", "gap", "hole", "truth", "word", "time"])


def parquet(directory: Path) -> str:
    for part, start in enumerate((0, 60)):
        rows = TABLE.slice(start, 60)
        pq.write_table(rows, directory / f"{part}.parquet", row_group_size=40)
    return str(directory)


def row_group(directory: Path) -> str:
    pq.write_table(TABLE, directory / "rows.parquet")
    return str(directory)


def csv(directory: Path) -> str:
    pacsv.write_csv(OF_CSV, directory / "rows.csv")
    return str(directory)


def feather_file(directory: Path) -> str:
    feather.write_feather(TABLE, directory / "rows.feather", compression="uncompressed")
    return str(directory)


def table(directory: Path) -> pa.Table:
    return TABLE


def arrays(directory: Path) -> dict[str, Any]:
    return {name: column.to_numpy() for name, column in zip("ab", TABLE.columns, strict=False)}


def chunks(directory: Path) -> pa.Table:
    return pa.concat_tables([TABLE.slice(start, 9) for start in range(0, ROWS, 9)])


class Items:
    """Items that share their arrays."""

    image = np.arange(6, dtype=np.int16).reshape(2, 3)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "half": index / 2, "image": self.image, "word": f"word {index}"}


def items(directory: Path) -> Items:
    return Items()


SOURCES = [parquet, row_group, csv, feather_file, table, chunks, arrays, items]


def read(data: Any, *, epochs: int = 1, write: bool = False, **config: Any) -> list[Any]:
    shard = shard_of(data, **config)
    batches = []
    for _ in range(epochs):
        for batch in shard.iter_batches(batch_size=7):
            batches.append({name: as_plain(array) for name, array in batch.items()})
            if write:
                for array in batch.values():
                    write_within(array)
                    array[...] = array[::-1].copy()
                    if array.dtype.kind == "f":
                        array[...] = -1
    return batches


def write_within(rows: np.ndarray[Any, Any]) -> None:
    for row in rows:
        if isinstance(row, dict):
            row.clear()
        elif isinstance(row, np.ndarray):
            write_within(row)
            row[...] = 0


def as_plain(array: np.ndarray[Any, Any]) -> list[Any]:
    return [plain(row) for row in array]


def plain(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return [plain(value) for value in row]
    return dict(row) if isinstance(row, dict) else np.asarray(row).tolist()


@pytest.mark.parametrize("shuffle", [False, "window", True])
@pytest.mark.parametrize("source", SOURCES)
def test_writing_to_a_batch_changes_no_other_one(
    tmp_path: Path, source: Callable[[Path], Any], shuffle: Any
) -> None:
    data = source(tmp_path)
    config = {"shuffle": shuffle, "remainder": "pad"}
    untouched = read(data, epochs=2, **config)
    assert len(untouched) == 2 * 13, "the last batch of each is padded with rows of the first"
    assert repr(read(data, epochs=2, write=True, **config)) == repr(untouched)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shuffle", [False, "window", True])
@pytest.mark.parametrize("source", SOURCES)
def test_batches_can_be_written_to_and_share_no_memory(
    tmp_path: Path, source: Callable[[Path], Any], shuffle: Any, shards: int
) -> None:
    shard = shard_of(source(tmp_path), shards=shards, shuffle=shuffle, remainder="pad")
    batches = [batch for _ in range(2) for batch in shard.iter_batches(batch_size=7)]
    assert all(array.flags.writeable for batch in batches for array in batch.values())
    for name in batches[0]:
        for one, other in combinations((batch[name] for batch in batches), 2):
            assert not np.shares_memory(one, other), name


@pytest.mark.parametrize("shuffle", [False, "window"])
def test_batches_that_are_kept_keep_no_large_column_in_memory(tmp_path: Path, shuffle: Any) -> None:
    # One row group of 40 MB, of which a batch is a hundredth.
    rows = 20_000
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((rows, 256), np.float64))
    pq.write_table(pa.table({"image": images}), tmp_path / "rows.parquet")
    shard = shard_of(str(tmp_path), shuffle=shuffle)
    before = pa.total_allocated_bytes()
    kept = [batch for batch in shard.iter_batches(batch_size=200)][::50]
    assert pa.total_allocated_bytes() - before < 4e6
    assert len(kept) == 2


def test_chunks_become_one_once_where_rows_come_from_anywhere() -> None:
    rows = 10_000
    table = pa.table({"id": np.arange(rows), "word": [f"word {row}" for row in range(rows)]})
    chunked = pa.concat_tables([table.slice(start, 10) for start in range(0, rows, 10)])
    shard = shard_of(chunked, shuffle=True)
    before = pa.total_allocated_bytes()
    first, second = (
        [pair for batch in shard.iter_batches() for pair in zip(*batch.values(), strict=True)]
        for _ in range(2)
    )
    # The table is copied in the first epoch, and no part of it in the second.
    assert 0.9 * table.nbytes < pa.total_allocated_bytes() - before < 1.5 * table.nbytes
    assert first != second
    assert sorted(first) == sorted(second) == [(row, f"word {row}") for row in range(rows)]


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("workers", [1, 8])
def test_chunks_become_one_if_a_quarter_of_the_free_memory_has_room_for_all_workers(
    workers: int, copied: bool
) -> None:
    table = pa.concat_tables([OF_CSV, OF_CSV])
    room = 4 * workers * table.nbytes - (not copied)
    rows = MappedRows(table, range(2 * ROWS), workers=workers, available=lambda: room)
    assert (rows.gatherable is not rows.decoded) == copied
    assert rows.gatherable.table.equals(table)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", [pa.time32("s"), pa.date32()])
def test_no_batch_converts_a_whole_column_of_times(kind: pa.DataType, shuffle: Any) -> None:
    rows = 80_000
    shard = shard_of(pa.table({"t": pa.array(range(rows), pa.int32()).cast(kind)}), shuffle=shuffle)
    tracemalloc.start()
    try:
        batch = next(iter(shard.iter_batches(batch_size=10)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(batch["t"]) == 10
    assert peak < 500_000
