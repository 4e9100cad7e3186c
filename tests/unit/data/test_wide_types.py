"""Columns that are put together from parts, and are more than fits into one array of their type."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.shards.shared_memory import from_shared_memory, to_shared_memory
from polytrain.data.types import schemas
from polytrain.data.types.schemas import in_one_piece


def shared(table: pa.Table) -> pa.Table:
    """Return the table as another process has it, which maps the memory of this one."""
    descriptor = to_shared_memory(table)
    try:
        return from_shared_memory(descriptor)
    finally:
        os.close(descriptor)


LARGE: dict[str, tuple[pa.Array, pa.DataType]] = {
    "strings": (pa.array(["ab", None, "cd"] * 20), pa.large_string()),
    "bytes": (pa.array([b"ab", None, b"cd"] * 20), pa.large_binary()),
    "lists": (pa.array([[1, 2], None, [3]] * 20), pa.large_list(pa.int64())),
    "lists of strings": (pa.array([["ab"], None, []] * 20), pa.large_list(pa.large_string())),
    "structs": (
        pa.array([{"a": "x"}, None, {"a": "y"}] * 20),
        pa.struct([("a", pa.large_string())]),
    ),
    "fixed lists of strings": (
        pa.array([["ab", "c"], None, ["d", "e"]] * 20, pa.list_(pa.string(), 2)),
        pa.list_(pa.large_string(), 2),
    ),
    "maps": (
        pa.array([[("k", "ab")], None, []] * 20, pa.map_(pa.string(), pa.string())),
        pa.map_(pa.large_string(), pa.large_string()),
    ),
    "categories": (
        pa.array(["ab", None, "cd"] * 20).dictionary_encode(),
        pa.dictionary(pa.int32(), pa.large_string()),
    ),
    "numbers": (pa.array([1, None, 3] * 20), pa.int64()),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_columns_have_offsets_of_64_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    column, kind = LARGE[name]
    table = pa.table({"x": pa.chunked_array([column, column])})
    assert in_one_piece(table).schema.field("x").type == column.type, "small ones stay"
    monkeypatch.setattr(schemas, "LARGE", 200)
    for found in (in_one_piece(table), shared(table)):
        assert found.schema.field("x").type == kind
        assert found.column("x").num_chunks == 1
        assert found.column("x").to_pylist() == column.to_pylist() * 2


EITHER: dict[str, Callable[[list[str]], pa.Array]] = {
    "strings": pa.array,
    "lists": lambda values: pa.array([[value] for value in values]),
    "structs": lambda values: pa.array([{"a": value} for value in values]),
    "fixed lists": lambda values: pa.array(
        [[value, ""] for value in values], pa.list_(pa.string(), 2)
    ),
    "maps": lambda values: pa.array(
        [[("k", value)] for value in values], pa.map_(pa.string(), pa.string())
    ),
    "categories": lambda values: pa.array(values).dictionary_encode(),
}


@pytest.mark.parametrize("kind", EITHER)
@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("format", ["numpy", "pandas", "arrow"])
def test_batches_across_parts_of_either_type(
    tmp_path: Path, shuffle: Any, format: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row group is large, the next one isn't."""
    monkeypatch.setattr(schemas, "LARGE", 1000)
    values = [f"{row}" * 200 for row in range(10)] + list("bcdefghijk")
    column = EITHER[kind](values)
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet", row_group_size=10)
    batches = shard_of(tmp_path, shuffle=shuffle).iter_batches(batch_size=4, format=format)
    found = [str(value) for batch in batches for value in batch["x"]]
    assert len(found) == len(values)
    assert all(any(value in text for text in found) for value in values)


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("format", ["numpy", "pandas", "arrow"])
@pytest.mark.parametrize("kind", ["files", "chunks"])
def test_more_categories_than_8_bits_have_room_for(
    tmp_path: Path, shuffle: Any, format: Any, kind: str
) -> None:
    words = [f"{number:03}" for number in range(200)]
    parts = [
        pa.table({"x": pa.array(some).dictionary_encode().cast(pa.dictionary(pa.int8(), "string"))})
        for some in (words[:100], words[100:])
    ]
    data: Any = pa.concat_tables(parts)
    if kind == "files":
        for name, part in zip("ab", parts, strict=True):
            pq.write_table(part, tmp_path / f"{name}.parquet")
        data = tmp_path
    shard = shard_of(data, shuffle=shuffle)
    [batch] = shard.iter_batches(batch_size=200, format=format)
    assert sorted(map(str, batch["x"])) == words
    held = shared(shard.to_arrow())
    assert held.column("x").to_pylist() == words


def test_a_missing_category_is_a_missing_value() -> None:
    """Arrow doesn't unify categories of which one is missing."""
    first = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 2, None], pa.int8()), pa.array(["a", None, "c"])
    )
    second = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array(["x", "c"]))
    nothing = pa.DictionaryArray.from_arrays(
        pa.array([0], pa.int8()), pa.array([None], pa.string())
    )
    column = in_one_piece(pa.table({"k": pa.chunked_array([first, second, nothing])})).column("k")
    assert column.to_pylist() == ["a", None, "c", None, "c", "x", None]
    assert column.num_chunks == 1
    assert column.chunk(0).dictionary.null_count == 0
