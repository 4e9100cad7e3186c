"""Data sets in memory: what becomes of their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from polytrain.data.shards.formats import column_to_numpy
from polytrain.data.sources.describe import describe
from polytrain.data.sources.parquet_files import RowGroupPiece
from polytrain.data.sources.pieces import TablePiece


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
@pytest.mark.parametrize("shape", [(6, 3), (6, 2, 2)])
def test_arrays_of_several_dimensions(dtype: Any, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape)) % 3 == 0).reshape(shape).astype(dtype)
    source = describe("train", {"image": array, "label": np.arange(len(array))})
    [piece] = source.pieces
    parts = [
        column_to_numpy(piece.read(start, stop).column("image")) for start, stop in ((0, 2), (2, 6))
    ]
    assert [part.dtype for part in parts] == [array.dtype] * 2
    np.testing.assert_array_equal(np.concatenate(parts), array)


def test_tensors_and_arrow_arrays_are_arrays() -> None:
    torch = pytest.importorskip("torch", reason="the torch backend is not installed")
    source = describe(
        "train",
        {
            "image": torch.arange(6.0, requires_grad=True).reshape(3, 2),
            "label": pa.array([1, None, 3]),
        },
    )
    [piece] = source.pieces
    assert column_to_numpy(piece.read(1, 2).column("image")).tolist() == [[2.0, 3.0]]
    assert piece.read(0, 3).column("label").to_pylist() == [1, None, 3]


VIEWS = {
    "string_view": (pa.string_view(), ["a", None, "long enough to lie elsewhere"]),
    "binary_view": (pa.binary_view(), [b"a", None, b"\xff"]),
    "list_view": (pa.list_view(pa.int8()), [[1], None, [2, 3]]),
    "large_list_view": (pa.large_list_view(pa.string_view()), [["a"], [], ["b", None]]),
    "struct": (pa.struct([("s", pa.list_view(pa.int8()))]), [{"s": []}, None, {"s": [1]}]),
    "nested": (pa.list_(pa.struct([("s", pa.string_view())])), [[{"s": "a"}], None, []]),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_become_what_every_library_reads(kind: str) -> None:
    arrow_type, values = VIEWS[kind]
    source = describe("train", pa.table({"x": pa.array(values, arrow_type)}))
    assert "view" not in str(source.schema.field("x").type)
    assert source.pieces[0].read(0, 3).column("x").to_pylist() == values
    # What can't read views stands for what can't be trained on.
    source.pieces[0].read(0, 3).to_pandas()


def test_strings_of_polars() -> None:
    source = describe("train", pl.DataFrame({"s": ["a", "b"], "c": ["x", "y"]}))
    assert "view" not in str(source.schema)
    assert source.pieces[0].read(1, 2).to_pydict() == {"s": ["b"], "c": ["y"]}


def test_a_query_computes_only_what_is_asked_for() -> None:
    def fails(column: Any) -> Any:
        raise AssertionError("not asked for")

    query = pl.LazyFrame({"x": [1, 2]}).with_columns(
        y=pl.col("x").map_batches(fails, return_dtype=pl.Int64)
    )
    assert describe("train", query, columns=["x"]).pieces[0].read(0, 2).to_pydict() == {"x": [1, 2]}


def test_arrays_of_hugging_face_become_tensors() -> None:
    features = datasets.Features(
        {"image": datasets.Array2D((2, 2), "float32"), "label": datasets.Value("int8")}
    )
    images = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    dataset = datasets.Dataset.from_dict({"image": images, "label": [1, 2, 3]}, features=features)
    source = describe("train", dataset.select([2, 0]))
    rows = source.pieces[0].read(0, 2)
    np.testing.assert_array_equal(column_to_numpy(rows.column("image")), images[[2, 0]])
    assert rows.column("label").to_pylist() == [3, 1]


def write_years(directory: Path) -> None:
    for year in (2023, 2024):
        (directory / f"year={year}").mkdir(parents=True)
        rows = pa.table({"x": [year, year + 1, year + 2]})
        pq.write_table(rows, directory / f"year={year}" / "part.parquet", row_group_size=2)


def test_a_parquet_dataset_stays_in_its_files(tmp_path: Path) -> None:
    write_years(tmp_path)
    dataset = pads.dataset(tmp_path, partitioning="hive")
    source = describe("train", dataset)
    assert all(isinstance(piece, RowGroupPiece) for piece in source.pieces)
    found = pa.concat_tables([piece.read(0, piece.rows) for piece in source.pieces])
    assert found.to_pydict() == dataset.to_table().to_pydict()


def test_a_file_system_that_the_user_brings(tmp_path: Path) -> None:
    write_years(tmp_path / "data")
    below = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    source = describe("train", pads.dataset("data", filesystem=below))
    assert all(isinstance(piece, RowGroupPiece) for piece in source.pieces)
    assert source.pieces[0].read(0, 2).to_pydict() == {"x": [2023, 2024]}


def filtered(tmp: Path) -> Any:
    write_years(tmp)
    return pads.dataset(tmp, partitioning="hive").filter(pads.field("x") > 2024)


def of_csv(tmp: Path) -> Any:
    pacsv.write_csv(pa.table({"x": [1, 2]}), tmp / "a.csv")
    return pads.dataset(tmp, format="csv")


def joined(tmp: Path) -> Any:
    write_years(tmp)
    years = [pads.dataset(tmp / f"year={year}") for year in (2023, 2024)]
    return pads.dataset(years)


@pytest.mark.parametrize("make", [filtered, of_csv, joined], ids=lambda make: make.__name__)
def test_other_datasets_of_arrow_become_a_table(make: Any, tmp_path: Path) -> None:
    dataset = make(tmp_path)
    [piece] = describe("train", dataset).pieces
    assert isinstance(piece, TablePiece)
    assert piece.table.to_pydict() == dataset.to_table().to_pydict()


def test_what_a_file_of_an_arrow_dataset_lacks_is_null(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [2]}), tmp_path / "b.parquet")
    source = describe("train", pads.dataset(tmp_path))
    found = pa.concat_tables([piece.read(0, 1) for piece in source.pieces])
    assert found.to_pydict() == {"x": [1, 2], "y": ["a", None]}
