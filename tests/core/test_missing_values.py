"""Rows without a value: what they are in batches, and that a column has one type in all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.types.nested import tensors_of
from polytrain.data_errors import ReadError, SourceError

NAN = math.nan

COLUMNS: dict[str, tuple[pa.Array, str, list[Any]]] = {
    "int64": (pa.array([1, 2, 3, 4, None, 6]), "float64", [1.0, 2.0, 3.0, 4.0, NAN, 6.0]),
    "uint8": (
        pa.array([1, 2, 3, 4, None, 6], pa.uint8()),
        "float64",
        [1.0, 2.0, 3.0, 4.0, NAN, 6.0],
    ),
    "float32": (
        pa.array([1.5, 2, 3, 4, None, 6], pa.float32()),
        "float32",
        [1.5, 2.0, 3.0, 4.0, NAN, 6.0],
    ),
    "bool": (
        pa.array([True, False, True, True, None, False]),
        "object",
        [True, False, True, True, None, False],
    ),
    "string": (pa.array(["a", "b", "", "c", None, "d"]), "object", ["a", "b", "", "c", None, "d"]),
    "nothing": (pa.nulls(6), "object", [None] * 6),
    "whole": (pa.array([1, 2, 3, 4, 5, 6]), "int64", [1, 2, 3, 4, 5, 6]),
}
"""Name → values, of which one beyond the first four is missing; NumPy's type; values there."""

CATEGORIES: dict[str, tuple[pa.Array, str, list[Any]]] = {
    "words": (
        pa.array(["lo", "hi", "lo", "hi", None, "hi"]).dictionary_encode(),
        "object",
        ["lo", "hi", "lo", "hi", None, "hi"],
    ),
    "numbers": (
        pa.array([10, 20, 10, 20, None, 30]).dictionary_encode(),
        "float64",
        [10.0, 20.0, 10.0, 20.0, NAN, 30.0],
    ),
    "flags": (
        pa.array([True, False, True, True, None, False]).dictionary_encode(),
        "object",
        [True, False, True, True, None, False],
    ),
    "no word": (pa.array([None] * 6, pa.string()).dictionary_encode(), "object", [None] * 6),
    "a missing category": (
        pa.DictionaryArray.from_arrays([0, 0, 0, 0, 1, 0], pa.array(["a", None])),
        "object",
        ["a", "a", "a", "a", None, "a"],
    ),
}


def table(directory: Path, columns: pa.Table) -> Any:
    return columns


def in_chunks(directory: Path, columns: pa.Table) -> Any:
    return pa.concat_tables([columns.slice(0, 4), columns.slice(4)])


def parquet(directory: Path, columns: pa.Table) -> Any:
    pq.write_table(columns, directory / "a.parquet", row_group_size=2)
    return directory


def two_files(directory: Path, columns: pa.Table) -> Any:
    pq.write_table(columns.slice(0, 4), directory / "a.parquet")
    pq.write_table(columns.slice(4), directory / "b.parquet")
    return directory


def arrow_dataset(directory: Path, columns: pa.Table) -> Any:
    return pads.dataset(two_files(directory, columns))


def arrow_file(directory: Path, columns: pa.Table) -> Any:
    with pa.ipc.new_file(directory / "a.arrow", columns.schema) as file:
        file.write_table(columns, max_chunksize=2)
    return directory


def csv(directory: Path, columns: pa.Table) -> Any:
    pacsv.write_csv(columns.slice(0, 4), directory / "a.csv")
    pacsv.write_csv(columns.slice(4), directory / "b.csv")
    return directory


def pandas(directory: Path, columns: pa.Table) -> Any:
    return columns.to_pandas(types_mapper=pd.ArrowDtype)


def polars(directory: Path, columns: pa.Table) -> Any:
    return pl.from_arrow(columns)


def hugging_face(directory: Path, columns: pa.Table) -> Any:
    return datasets.Dataset(columns)


def arrays(directory: Path, columns: pa.Table) -> Any:
    return dict(zip(columns.column_names, columns.columns, strict=True))


SOURCES = [
    table,
    in_chunks,
    parquet,
    two_files,
    arrow_file,
    arrow_dataset,
    csv,
    pandas,
    polars,
    hugging_face,
    arrays,
]
FOR_ALL = [
    (source, name)
    for source in SOURCES
    for name in COLUMNS
    # A line without anything is no row, and an empty field no string.
    if not (source is csv and name in ("nothing", "string"))
]
WITH_CATEGORIES = [
    (source, name)
    for source in (table, in_chunks, parquet)
    for name in CATEGORIES
    # Parquet has no missing category.
    if not (source is parquet and name == "a missing category")
]


def batches_of(
    source: Callable[[Path, pa.Table], Any],
    column: pa.Array,
    directory: Path,
    *,
    format: Any = "numpy",
    **config: Any,
) -> list[Any]:
    """The column's batches of two rows, on two workers, in the order of the rows."""
    data = source(directory, pa.table({"x": column, "row": pa.array(range(6))}))
    found = []
    for rank in (0, 1):
        shard = shard_of(data, world_size=2, rank=rank, **config)
        found += [
            (int(batch["row"][0]), batch["x"])
            for batch in shard.iter_batches(batch_size=1, format=format)
        ]
    return [values for _, values in sorted(found, key=lambda batch: batch[0])]


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize(("source", "name"), [*FOR_ALL, *WITH_CATEGORIES])
def test_a_column_has_one_type_in_all_batches(
    source: Callable[[Path, pa.Table], Any], name: str, shuffle: Any, tmp_path: Path
) -> None:
    column, dtype, expected = (COLUMNS | CATEGORIES)[name]
    batches = batches_of(source, column, tmp_path, shuffle=shuffle)
    if source is csv and name == "float32":
        dtype = "float64"
    assert [str(batch.dtype) for batch in batches] == [dtype] * 6
    assert [repr(value) for batch in batches for value in batch.tolist()] == list(
        map(repr, expected)
    )


@pytest.mark.parametrize("name", ["int64", "uint8", "float32", "bool", "whole"])
@pytest.mark.parametrize("source", [table, parquet, csv])
def test_a_column_has_one_type_in_all_frames(
    source: Callable[[Path, pa.Table], Any], name: str, tmp_path: Path
) -> None:
    column, dtype, expected = COLUMNS[name]
    batches = batches_of(source, column, tmp_path, format="pandas")
    if source is csv and name == "float32":
        dtype = "float64"
    assert [str(batch.dtype) for batch in batches] == [dtype] * 6
    assert [repr(value) for batch in batches for value in batch.tolist()] == list(
        map(repr, expected)
    )


@pytest.mark.parametrize("name", ["int64", "bool", "whole"])
@pytest.mark.parametrize("source", [table, parquet, csv])
def test_a_transform_gets_one_type(
    source: Callable[[Path, pa.Table], Any], name: str, tmp_path: Path
) -> None:
    column, dtype, expected = COLUMNS[name]
    seen = []

    def noted(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(batch["x"].dtype))
        return {"x": batch["x"], "row": batch["row"]}

    batches = batches_of(source, column, tmp_path, transform=noted)
    assert set(seen) == {dtype}
    assert {str(batch.dtype) for batch in batches} == {dtype}
    found = [value for batch in batches for value in batch.tolist()]
    assert list(map(repr, found)) == list(map(repr, expected))


TENSORS = [np.full((2, 3), row) for row in range(6)]


def tensors(dtype: Any) -> pa.Array:
    """One of each row, and none in the last but one."""
    whole = tensors_of(np.stack(TENSORS).astype(dtype))
    storage = whole.storage.take(pa.array([0, 1, 2, 3, None, 5]))
    return pa.ExtensionArray.from_storage(whole.type, storage)


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
@pytest.mark.parametrize("source", [table, parquet, arrow_file])
def test_rows_without_a_tensor(
    source: Callable[[Path, pa.Table], Any], dtype: Any, tmp_path: Path
) -> None:
    batches = batches_of(source, tensors(dtype), tmp_path)
    assert [str(batch.dtype) for batch in batches] == ["object"] * 6
    rows = [batch[0] for batch in batches]
    assert rows[4] is None
    for row in (0, 1, 2, 3, 5):
        assert rows[row].dtype == dtype
        assert rows[row].tolist() == TENSORS[row].astype(dtype).tolist()
        assert rows[row].flags.writeable


@pytest.mark.parametrize("source", [table, parquet, csv])
@pytest.mark.parametrize("format", ["numpy", "pandas"])
def test_whole_numbers_are_not_rounded_for_a_missing_one(
    source: Callable[[Path, pa.Table], Any], format: str, tmp_path: Path
) -> None:
    column = pa.array([2**53 + 1, 2, 3, 4, None, 6])
    with pytest.raises(ReadError, match=r"'x'.*9007199254740993.*format=\"arrow\""):
        batches_of(source, column, tmp_path, format=format)
    assert batches_of(source, column, tmp_path, format="arrow")[0].to_pylist() == [2**53 + 1]


def test_missing_values_that_nobody_knew_of_are_an_error(tmp_path: Path) -> None:
    """A file need not say how many values are missing."""
    columns = pa.table({"x": COLUMNS["int64"][0]})
    pq.write_table(columns, tmp_path / "a.parquet", row_group_size=2, write_statistics=False)
    batches = iter(shard_of(tmp_path).iter_batches(batch_size=1))
    assert next(batches)["x"].dtype == np.int64
    with pytest.raises(ReadError, match=r"'x'.* without a value"):
        list(batches)


LISTS = {
    "lists": pa.list_(pa.int64()),
    "large lists": pa.large_list(pa.int64()),
    "lists of a fixed size": pa.list_(pa.int64(), 2),
}
NUMBERS = [[1, 2], [3, 4], [5, 6], [7, 8], [9, None], [1, 2]]


def json_lines(directory: Path, columns: pa.Table) -> Any:
    lines = map(json.dumps, columns.to_pylist())
    (directory / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return directory


def types_and_values(batches: list[Any]) -> tuple[set[str], list[Any]]:
    """The types of the arrays of lists, and what is in them."""
    rows = [row for batch in batches for row in batch]
    return {str(row.dtype) for row in rows}, [row.tolist() for row in rows]


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("format", ["numpy", "pandas"])
@pytest.mark.parametrize("source", [table, in_chunks, arrow_file, json_lines, hugging_face])
def test_numbers_that_lists_lack_give_all_lists_one_type(
    source: Callable[[Path, pa.Table], Any], format: str, kind: str, tmp_path: Path
) -> None:
    batches = batches_of(source, pa.array(NUMBERS, LISTS[kind]), tmp_path, format=format)
    types, values = types_and_values(batches)
    assert types == {"float64"}
    expected = [[NAN if number is None else float(number) for number in row] for row in NUMBERS]
    assert repr(values) == repr(expected)


@pytest.mark.parametrize("source", [table, arrow_file, json_lines])
def test_truth_values_that_lists_lack(
    source: Callable[[Path, pa.Table], Any], tmp_path: Path
) -> None:
    rows = [[True, False], [True, True], [False, True], [True, None], [None, True], [True, True]]
    types, values = types_and_values(batches_of(source, pa.array(rows), tmp_path))
    assert types == {"object"}
    assert values == rows


def test_a_fixed_size_tells_what_a_parquet_file_lacks(tmp_path: Path) -> None:
    """A footer counts missing lists and missing numbers together."""
    kind = LISTS["lists of a fixed size"]
    batches = batches_of(parquet, pa.array(NUMBERS, kind), tmp_path)
    assert types_and_values(batches)[0] == {"float64"}
    rows = [[1, 2], [3, 4], None, [5, 6], [7, 8], None]
    batches = batches_of(parquet, pa.array(rows, kind), tmp_path)
    assert {batch.dtype.name for batch in batches} == {"object"}
    assert {str(row.dtype) for batch in batches for row in batch if row is not None} == {"int64"}


def test_names_with_dots_in_a_parquet_file(tmp_path: Path) -> None:
    pair = pa.array([None, [1, 2]], pa.list_(pa.int64(), 2))
    columns = {"label": [1, 2], "label.name": ["a", None], "pair.of.numbers": pair, "pair": [3, 4]}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    [batch] = shard_of(str(tmp_path)).iter_batches(batch_size=2)
    dtypes = [array.dtype.name for array in batch.values()]
    assert dtypes == ["int64", "object", "object", "int64"]


def test_numbers_that_lists_in_a_parquet_file_lack_are_an_error(tmp_path: Path) -> None:
    """Its footer says as much of lists that are empty: those stay whole numbers."""
    empty = pa.array([[1], [], None, [2], [], [3]])
    batches = batches_of(parquet, empty, tmp_path)
    assert {str(row.dtype) for batch in batches for row in batch if row is not None} == {"int64"}
    column = pa.array(NUMBERS)
    with pytest.raises(ReadError, match=r"lists.*'x'.* without a value.*format=\"arrow\""):
        batches_of(parquet, column, tmp_path)
    assert batches_of(parquet, column, tmp_path, format="arrow")[4].to_pylist() == [[9, None]]


@pytest.mark.parametrize("source", [table, arrow_file, json_lines, polars])
@pytest.mark.parametrize("config", [{}, {"transform": dict}])
@pytest.mark.parametrize("format", ["numpy", "pandas"])
def test_whole_numbers_in_lists_are_not_rounded_for_a_missing_one(
    source: Callable[[Path, pa.Table], Any], config: Any, format: str, tmp_path: Path
) -> None:
    column = pa.array([[2**53 + 1, None], *NUMBERS[1:]])
    with pytest.raises((ReadError, SourceError), match="9007199254740993"):
        batches_of(source, column, tmp_path, format=format, **config)


@pytest.mark.parametrize("format", ["numpy", "pandas"])
def test_whole_numbers_within_structs_are_as_they_are(format: str, tmp_path: Path) -> None:
    structs = [{"n": 2**53 + 1}, {"n": None}, {"n": 2}, None, {"n": 3}, {"n": 4}]
    maps = pa.array(
        [[("n", 2**53 + 1), ("m", None)], *([[]] * 5)], pa.map_(pa.string(), pa.int64())
    )
    found = [
        row
        for batch in batches_of(table, pa.array(structs), tmp_path, format=format)
        for row in batch
    ]
    assert found == structs
    lists = [[{"n": 2**53 + 1}, {"n": None}], *([[]] * 5)]
    [first, *_] = batches_of(table, pa.array(lists), tmp_path, format=format)
    assert list(first[0]) == lists[0]
    [first, *_] = batches_of(table, maps, tmp_path, format=format)
    assert list(first[0]) == [("n", 2**53 + 1), ("m", None)]


@pytest.mark.parametrize("source", [table, arrow_file])
def test_rows_without_a_list_of_a_fixed_size(
    source: Callable[[Path, pa.Table], Any], tmp_path: Path
) -> None:
    column = pa.array([[1, 2], [3, 4], [5, 6], [7, 8], None, [1, 2]], pa.list_(pa.int64(), 2))
    batches = batches_of(source, column, tmp_path)
    assert [batch.dtype.name for batch in batches] == ["object"] * 6
    assert batches[4][0] is None
    assert batches[0][0].tolist() == [1, 2]
    assert batches[0][0].flags.writeable
