"""Data sets in memory: what becomes of their columns."""

from __future__ import annotations

from collections import deque
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.feather as feather
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain import DataConfig
from polytrain.boosting.columns import codes_of
from polytrain.data.checks import described
from polytrain.data.read.describe import describe
from polytrain.data.read.parquet_files import RowGroupPiece
from polytrain.data.read.pieces import TablePiece
from polytrain.data.shards.groups import group_starts
from polytrain.data.types.columns import column_to_numpy
from polytrain.data.types.nested import tensors_of
from polytrain.data_errors import ReadError, SourceError
from polytrain_plugins import is_category


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


@pytest.mark.parametrize("form", ["table", "parquet", "feather"])
@pytest.mark.parametrize("missing", [False, True])
def test_truth_values_of_8_bits_are_truth_values(tmp_path: Path, form: str, missing: bool) -> None:
    expected = [True, None if missing else False, True]
    stored = pa.array(expected, pa.bool_()).cast(pa.int8())
    data: Any = pa.table({"t": pa.ExtensionArray.from_storage(pa.bool8(), stored)})
    if form == "parquet":
        pq.write_table(data, tmp_path / "rows.parquet")
        data = tmp_path
    elif form == "feather":
        feather.write_feather(data, tmp_path / "rows.feather")
        data = tmp_path
    [batch] = shard_of(data).iter_batches()
    assert batch["t"].tolist() == expected
    assert batch["t"].dtype == (object if missing else bool)
    assert shard_of(data).schema().field("t").type == pa.bool_()


VIEWS = {
    "string_view": (pa.string_view(), ["a", None, "long enough to lie elsewhere"]),
    "binary_view": (pa.binary_view(), [b"a", None, b"\xff"]),
    "list_view": (pa.list_view(pa.int8()), [[1], None, [2, 3]]),
    "large_list_view": (pa.large_list_view(pa.string_view()), [["a"], [], ["b", None]]),
    "struct": (pa.struct([("s", pa.list_view(pa.int8()))]), [{"s": []}, None, {"s": [1]}]),
    "nested": (pa.list_(pa.struct([("s", pa.string_view())])), [[{"s": "a"}], None, []]),
    "map": (
        pa.map_(pa.string_view(), pa.list_view(pa.int8())),
        [[("a", [1]), ("b", None)], None, [("c", [])]],
    ),
    "fixed_size_list": (
        pa.list_(pa.string_view(), 2),
        [["a", None], None, ["long enough to lie elsewhere", ""]],
    ),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_become_what_every_library_reads(kind: str) -> None:
    arrow_type, values = VIEWS[kind]
    source = describe("train", pa.table({"x": pa.array(values, arrow_type)}))
    assert "view" not in str(source.schema.field("x").type)
    assert source.pieces[0].read(0, 3).column("x").to_pylist() == values
    assert source.pieces[0].read(1, 3).column("x").to_pylist() == values[1:]
    # What can't read views stands for what can't be trained on.
    source.pieces[0].read(0, 3).to_pandas()


@pytest.mark.parametrize("kind", ["map", "fixed_size_list"])
def test_parts_of_arrays_of_views(kind: str) -> None:
    arrow_type, values = VIEWS[kind]
    part = pa.array(values, arrow_type).slice(1, 2)
    source = describe("train", pa.table({"x": part}))
    assert source.pieces[0].read(0, 2).column("x").to_pylist() == values[1:]


@pytest.mark.parametrize("values", [["a", "b"], [1, None]])
def test_run_lengths_become_what_every_library_reads(values: list[Any], tmp_path: Path) -> None:
    column = pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(values))
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema({"x": column.type})) as file:
        file.write_table(pa.table({"x": column}))
    for data in (pa.table({"x": column}), tmp_path):
        assert shard_of(data).to_arrow().column("x").to_pylist() == [values[0], *values]


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


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("float64", [[0.1, 1e300], [1.0, 2.0]]),
        ("int64", [[2**53 + 1, 1], [2, 3]]),
        ("bool", [[True, False], [False, True]]),
    ],
)
def test_arrays_of_hugging_face_keep_their_type(kind: str, values: list[Any]) -> None:
    features = datasets.Features({"x": datasets.Array2D((2, 2), kind)})
    for rows in ([values, values], [values, None]):
        data = datasets.Dataset.from_list([{"x": row} for row in rows], features=features)
        [batch] = shard_of(data).iter_batches()
        assert batch["x"][0].dtype == kind
        assert [None if row is None else row.tolist() for row in batch["x"]] == rows


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


def column(data: Any) -> list[Any]:
    source = describe("train", {"x": data})
    found: list[Any] = source.pieces[0].read(0, source.pieces[0].rows).column("x").to_pylist()
    return found


KEPT: dict[str, tuple[Any, list[Any]]] = {
    "a masked array": (np.ma.array([1, 2, 3], mask=[0, 1, 0]), [1, None, 3]),
    "a masked array of floats": (np.ma.array([0.5, 2, 3], mask=[0, 0, 1]), [0.5, 2.0, None]),
    "a masked array without a mask": (np.ma.array([1, 2, 3]), [1, 2, 3]),
    "a masked matrix without a mask": (np.ma.array([[1], [2]]), [[1], [2]]),
    "a masked row of whole numbers": (np.ma.array([2**53 + 1, 2], mask=[0, 1]), [2**53 + 1, None]),
    "a masked number in a list": ([1, np.ma.masked, 3], [1, None, 3]),
    "whole numbers and none": ([2**53 + 1, None], [2**53 + 1, None]),
    "whole numbers and fractions": ([1, 0.5, 2**53], [1.0, 0.5, 2.0**53]),
    "large floats": ([1e300, 0.5], [1e300, 0.5]),
    "bytes that end with zeros": ([b"a\x00", b"b"], [b"a\x00", b"b"]),
    "text that ends with zeros": (["a\x00", "b"], ["a\x00", "b"]),
    "bytes with zeros in an array": (np.array([b"a\x00b", b"c"]), [b"a\x00b", b"c"]),
    "text with zeros in an array": (np.array(["a\x00b", "c"]), ["a\x00b", "c"]),
    "masked bytes with zeros": (
        np.ma.array([b"a\x00b", b"c"], mask=[False, True]),
        [b"a\x00b", None],
    ),
    "text of NumPy's newest type": (
        np.array(["a", "long enough to lie elsewhere"], dtype=np.dtypes.StringDType()),
        ["a", "long enough to lie elsewhere"],
    ),
    "missing text of NumPy's newest type": (
        np.array(["a", None], dtype=np.dtypes.StringDType(na_object=None)),
        ["a", None],
    ),
    "a masked array in the other byte order": (
        np.ma.array(np.array([1, 258], dtype=">i4"), mask=[True, False]),
        [None, 258],
    ),
    "a deque": (deque([1, None]), [1, None]),
    "a series with a missing number": (
        pd.Series([2**53 + 1, None], dtype="Int64"),
        [2**53 + 1, None],
    ),
    "a series of categories": (pd.Series(["a", None], dtype="category"), ["a", None]),
    "an array of categories": (pd.Categorical(["a", None]), ["a", None]),
    "an array of truth values": (pd.array([True, None]), [True, None]),
    "a series of polars": (pl.Series([2**53 + 1, None]), [2**53 + 1, None]),
    "the other byte order": (np.array([1, 258], dtype=">i4"), [1, 258]),
    "tensors in the other byte order": (np.array([[1.5], [2.5]], dtype=">f8"), [[1.5], [2.5]]),
}


@pytest.mark.parametrize("case", KEPT)
def test_values_are_kept(case: str) -> None:
    data, expected = KEPT[case]
    assert column(data) == expected


CHANGED: dict[str, tuple[Any, str]] = {
    "numbers and text": ([1, 2, "NA"], "'x' can't become a column.*'NA'"),
    "text and numbers": (["NA", 1], "'x' can't become a column"),
    "numbers and text in a deque": (deque([1, "NA"]), "'x' can't become a column.*'NA'"),
    "large numbers and fractions in a deque": (
        deque([2**53 + 1, 0.5]),
        "'x' .*round 9007199254740993",
    ),
    "large numbers and fractions": ([2**53 + 1, 0.5], "'x' .*round 9007199254740993"),
    "large numbers of NumPy": (
        [np.int64(2**53 + 1), np.float64(0.5)],
        "'x' .*round 9007199254740993",
    ),
    "large numbers in rows": ([[2**53 + 1, 1], [0.5, 1]], "'x' .*round 9007199254740993"),
    "large numbers in rows that differ": ([[2**53 + 1], [0.5, 1]], "'x' .*round 9007199254740993"),
    "large numbers in arrays": (
        [np.array([2**53 + 1]), np.array([0.5, 1])],
        "'x' .*round 9007199254740993",
    ),
    "more than 64 bits": ([2**64, 1], "'x' can't become a column"),
    "masks in rows": (np.ma.array(np.ones((2, 2)), mask=[[0, 1], [0, 0]]), "'x' .*masked"),
    "masks in a list of rows": (
        [np.ma.array([1, 2], mask=[0, 1]), np.ma.array([3, 4])],
        "'x' .*masked",
    ),
    "masks in rows that differ": ([np.ma.array([1, 2], mask=[0, 1]), [3]], "'x' .*masked"),
    "more than double precision": (np.ones((2, 2), dtype=np.longdouble), "'x' can't become"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_values_that_would_change_are_refused(case: str) -> None:
    data, message = CHANGED[case]
    with pytest.raises(SourceError, match=message) as caught:
        column(data)
    assert caught.value.remedy


class Meters(pa.ExtensionType):
    """Numbers with a name."""

    def __init__(self, stored: pa.DataType | None = None) -> None:
        super().__init__(stored or pa.int64(), "tests.meters")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, stored: pa.DataType, serialized: bytes) -> Meters:
        return cls(stored)


@pytest.mark.parametrize("file_format", ["table", "parquet", "arrow"])
@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_numbers_with_a_name_have_one_type(
    file_format: str, batch_format: Any, tmp_path: Path
) -> None:
    values = pa.ExtensionArray.from_storage(Meters(), pa.array([1, None]))
    data: Any = pa.table({"x": values})
    if file_format == "parquet":
        pq.write_table(data, tmp_path / "a.parquet")
        data = tmp_path
    elif file_format == "arrow":
        feather.write_feather(data, tmp_path / "a.arrow")
        data = tmp_path
    batches = shard_of(data).iter_batches(batch_size=1, format=batch_format)
    assert [batch["x"].dtype for batch in batches] == [np.float64, np.float64]


def test_numbers_with_a_name_are_not_rounded() -> None:
    values = pa.ExtensionArray.from_storage(Meters(), pa.array([2**53 + 1, None]))
    with pytest.raises(ReadError, match=r"'x' lacks values.*9007199254740993"):
        [*shard_of(pa.table({"x": values})).iter_batches()]


def test_categories_in_lists_have_one_type(tmp_path: Path) -> None:
    categories = pa.array([1, None, 3, 4]).dictionary_encode()
    lists = pa.table({"x": pa.ListArray.from_arrays([0, 2, 3, 4], categories)})
    feather.write_feather(lists, tmp_path / "a.arrow", chunksize=1)
    batches = shard_of(tmp_path).iter_batches(batch_size=1)
    rows = [row for batch in batches for row in batch["x"]]
    assert [str(row.tolist()) for row in rows] == ["[1.0, nan]", "[3.0]", "[4.0]"]


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_a_category_that_is_missing(batch_format: Any) -> None:
    codes = pa.array([0, 1, 2, None])
    table = pa.table(
        {
            "text": pa.DictionaryArray.from_arrays(codes, pa.array(["a", None, "b"])),
            "number": pa.DictionaryArray.from_arrays(codes, pa.array([5, None, 6])),
        }
    )
    [batch] = shard_of(table).iter_batches(format=batch_format)
    frame = pd.DataFrame(batch)
    assert frame.isna()["text"].tolist() == frame.isna()["number"].tolist() == [0, 1, 0, 1]
    assert frame["text"].dropna().tolist() == ["a", "b"]
    assert frame["number"].dropna().tolist() == [5, 6]


def test_intervals_of_pandas() -> None:
    frame = pd.DataFrame({"x": pd.cut([1, 3], [0, 2, 4])})
    [batch] = shard_of(frame).iter_batches(format="pandas")
    assert batch["x"].tolist() == frame["x"].tolist()


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_times_of_day_that_python_lacks(batch_format: Any) -> None:
    times = pa.table({"x": pa.array([1_001, None], pa.time64("ns"))})
    with pytest.raises(ReadError, match="'x' has times of day with nanoseconds"):
        [*shard_of(times).iter_batches(format=batch_format)]
    [batch] = shard_of(times.slice(1)).iter_batches(format=batch_format)
    assert [*batch["x"]] == [None]


@pytest.mark.parametrize("form", ["frame", "series", "query"])
def test_objects_of_polars_are_refused(form: str) -> None:
    frame = pl.DataFrame({"x": pl.Series([object()], dtype=pl.Object), "y": [1]})
    data: Any = {"frame": frame, "series": {"x": frame["x"]}, "query": frame.lazy()}[form]
    with pytest.raises(SourceError, match="'x' holds Python objects"):
        describe("train", data)
    if form != "series":
        assert describe("train", data, columns=["y"]).info.num_rows == 1


@pytest.mark.parametrize("zoned_first", [True, False])
@pytest.mark.parametrize("form", ["list", "series", "dicts", "frame"])
def test_times_with_and_without_a_zone(form: str, zoned_first: bool) -> None:
    """Arrow would move one of them by the zone's distance from UTC."""
    zoned = datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    times = [zoned, datetime(2024, 1, 1), None][:: 1 if zoned_first else -1]
    for values in (times, [time for time in times if time != datetime(2024, 1, 1)]):
        series = pd.Series(values, dtype=object)
        data: Any = {
            "list": {"x": values},
            "series": {"x": series},
            "dicts": [{"x": time} for time in values],
            "frame": pd.DataFrame({"x": series}),
        }[form]
        if values is times:
            with pytest.raises(SourceError, match="'x' has times with a zone and times without"):
                describe("train", data)
        else:
            found = describe("train", data).pieces[0].read(0, 2).column("x").to_pylist()
            assert found == values


@pytest.mark.parametrize("floats", [pa.float16(), pa.float32(), pa.float64()])
def test_decimals_beside_floats(floats: pa.DataType, tmp_path: Path) -> None:
    decimals = pa.array([Decimal("1234567890.12")], pa.decimal128(12, 2))
    for name, values in (("a", decimals), ("b", pa.array([0.5], floats))):
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet")
    with pytest.raises(SourceError, match=rf"'x' is decimal128\(12, 2\) in .* and {floats} in "):
        describe("train", tmp_path)


def test_columns_that_hugging_face_shows() -> None:
    dataset = datasets.Dataset.from_dict({"a": [1], "b": [2], "c": [3]})
    for shown, expected in (
        (dataset.with_format("numpy", columns=["c", "a"]), ("a", "c")),
        (dataset.with_format("numpy", columns=["a"], output_all_columns=True), ("a", "b", "c")),
        (dataset.with_format("numpy"), ("a", "b", "c")),
    ):
        assert describe("train", shown).info.columns == expected
    hidden = dataset.with_format("numpy", columns=["a"])
    with pytest.raises(SourceError, match="no column 'b'"):
        describe("train", hidden, columns=["b"])


@pytest.mark.parametrize("columns", [None, ["x", "year"], ["year"], ["year", "x"]])
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_column_of_the_file_and_of_its_directory(
    tmp_path: Path, columns: list[str] | None, ending: str
) -> None:
    """The file's own counts, whatever is read besides."""
    directory = tmp_path / "year=2023" / "month=7"
    directory.mkdir(parents=True)
    rows = pd.DataFrame({"x": [1], "year": [1999]})
    if ending == "csv":
        rows.to_csv(directory / "a.csv", index=False)
    else:
        rows.to_parquet(directory / "a.parquet")
    [piece] = describe("train", tmp_path, columns=columns).pieces
    expected = {"x": [1], "year": [1999], "month": [7]}
    assert piece.read(0, 1).to_pydict() == {name: expected[name] for name in columns or expected}


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.int64])
def test_tensors_keep_their_shape_in_frames(dtype: Any) -> None:
    images = np.arange(12).reshape(2, 2, 3).astype(dtype)
    shard = shard_of({"before": [0, 1], "image": images, "after": [2, 3]})
    for frame in (shard.to_pandas(), *shard.iter_batches(format="pandas")):
        assert list(frame.columns) == ["before", "image", "after"]
        for row, image in zip(frame["image"], images, strict=True):
            assert row.dtype == dtype
            assert row.tolist() == image.tolist()
            row.fill(0)
    assert column_to_numpy(shard.to_arrow()["image"]).tolist() == images.tolist()


STORED = {
    "fixed": (
        "ray.data.arrow_tensor_v2",
        b"[2, 2]",
        pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8]], pa.large_list(pa.int64())),
        [[[1, 2], [3, 4]], None, [[5, 6], [7, 8]]],
    ),
    "booleans": (
        "ray.data.arrow_tensor",
        b"[2]",
        pa.array([[True, False], [False, False], [True, True]], pa.list_(pa.bool_())),
        [[True, False], [False, False], [True, True]],
    ),
    "variable": (
        "ray.data.arrow_variable_shaped_tensor",
        b"2",
        pa.array(
            [{"data": [1, 2], "shape": [1, 2]}, None, {"data": [3], "shape": [1, 1]}],
            pa.struct({"data": pa.large_list(pa.int64()), "shape": pa.list_(pa.int64())}),
        ),
        [[[1, 2]], None, [[3]]],
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_tensors_that_ray_data_has_written(kind: str, tmp_path: Path) -> None:
    """Without Ray they are lists, with a note of what they were."""
    name, parameter, values, expected = STORED[kind]
    notes = {"ARROW:extension:name": name, "ARROW:extension:metadata": parameter}
    table = pa.table([values], schema=pa.schema([pa.field("x", values.type, metadata=notes)]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for data in (table, tmp_path, pads.dataset(tmp_path)):
        shard = shard_of(data)
        rows = [row for batch in shard.iter_batches(batch_size=2) for row in batch["x"]]
        assert [None if row is None else as_lists(row) for row in rows] == expected


def as_lists(row: Any) -> Any:
    return [as_lists(part) for part in row] if isinstance(row, np.ndarray) else row


@pytest.mark.parametrize(
    "columns", [pd.Index(["y"]), np.array(["y"]), ("y",), {"y": 1}.keys(), iter(["y"])]
)
def test_columns_are_named_in_whatever_holds_names(columns: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1], "y": [2]})
    assert describe("train", frame, columns=columns).info.columns == ("y",)


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["b", "a", "c"])])
def test_categories_of_polars(kind: Any) -> None:
    data = pl.DataFrame({"x": pl.Series(["a", "b", None], dtype=kind)})
    shard = shard_of(data)
    assert is_category(shard.schema().field("x").type)
    categories = pa.array(["a", "b"])
    assert codes_of(shard.to_arrow().column("x"), categories).to_pylist() == [0, 1, None]
    [frame] = shard.iter_batches(format="pandas")
    assert frame["x"].astype(object).where(frame["x"].notna(), None).tolist() == ["a", "b", None]
    [batch] = shard.iter_batches()
    assert batch["x"].tolist() == ["a", "b", None]
    lists = pl.DataFrame({"x": pl.Series([["b", "a"], [], None], dtype=pl.List(kind))})
    assert shard_of(lists).to_arrow().column("x").to_pylist() == [["b", "a"], [], None]


def test_codes_of_more_categories_than_8_bits_have_room_for() -> None:
    words = [f"{number:03}" for number in range(200)]
    kind = pa.dictionary(pa.int8(), pa.string())
    chunks = [pa.array(some).dictionary_encode().cast(kind) for some in (words[:100], words[100:])]
    assert codes_of(pa.chunked_array(chunks), pa.array(words)).to_pylist() == list(range(200))


def test_frames_in_the_other_byte_order() -> None:
    frame = pd.DataFrame({"x": np.array([1, 258], dtype=">i4"), "y": ["a", "b"]})
    assert describe("train", frame).pieces[0].read(0, 2).to_pydict() == {
        "x": [1, 258],
        "y": ["a", "b"],
    }


@pytest.mark.parametrize("kind", ["csr_matrix", "coo_matrix", "csr_array"])
def test_sparse_matrices_are_refused_with_the_way_out(kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="scipy comes with the boosters")
    matrix = getattr(sparse, kind)(np.eye(3))
    with pytest.raises(SourceError, match=f"{kind} is not a data set"):
        describe("train", matrix)
    with pytest.raises(SourceError, match="'x' is a sparse matrix") as caught:
        describe("train", {"x": matrix})
    assert "toarray" in caught.value.remedy


@pytest.mark.parametrize(
    "notes", ["{not json", "[]", "null", '"x"', '{"index_columns": null}', '{"index_columns": 3}']
)
def test_notes_of_pandas_that_are_none(tmp_path: Path, notes: str) -> None:
    table = pa.table({"x": [1]}).replace_schema_metadata({"pandas": notes})
    pq.write_table(table, tmp_path / "a.parquet")
    assert describe("train", tmp_path).info.columns == ("x",)
    for data in (table, tmp_path):
        [frame] = shard_of(data).iter_batches(format="pandas")
        assert frame.to_dict("list") == {"x": [1]}


FRAME = pd.DataFrame({"x": [1, 2], "y": [3, 4]})
NAMELESS, NAMED = FRAME.set_axis([5, 6]), FRAME.set_axis(pd.Index(["a", "b"], name="key"))


def with_index(directory: Path, frame: pd.DataFrame, kind: str) -> Any:
    """The frame as a data set of this kind, with all that is known of its index."""
    table = pa.Table.from_pandas(frame)
    if kind == "frame":
        return frame
    if kind == "table":
        return table
    if kind == "dataset of a table":
        return pads.dataset(table)
    if kind == "csv":
        frame.to_csv(directory / "a.csv")
    elif kind == "arrow":
        with pa.ipc.new_file(directory / "a.arrow", table.schema) as file:
            file.write_table(table)
    else:
        pq.write_table(table, directory / "a.parquet")
    return pads.dataset(directory) if kind == "dataset of files" else directory


KINDS = ["frame", "table", "dataset of a table", "arrow", "parquet", "dataset of files"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frame", [NAMELESS, NAMED])
def test_an_index_of_pandas_is_no_column(tmp_path: Path, frame: pd.DataFrame, kind: str) -> None:
    data = with_index(tmp_path, frame, kind)
    assert describe("train", data).info.columns == ("x", "y")
    shard = shard_of(data)
    [read] = shard.iter_batches(format="pandas")
    assert read.columns.tolist() == ["x", "y"]
    assert read.index.tolist() == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_with_a_name_is_a_column_if_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    data = with_index(tmp_path, NAMED, kind)
    assert describe("train", data).index == ("key",)
    source = describe("train", data, columns=["key", "x"])
    assert source.index == ()
    table = pa.concat_tables([piece.read(0, piece.rows) for piece in source.pieces])
    assert table.to_pydict() == {"key": ["a", "b"], "x": [1, 2]}


def test_the_index_in_a_csv_file_is_no_column(tmp_path: Path) -> None:
    with_index(tmp_path, NAMELESS, "csv")
    source = describe("train", tmp_path)
    assert (source.info.columns, source.index) == (("x", "y"), ("",))
    assert source.pieces[0].read(0, 2).to_pydict() == {"x": [1, 2], "y": [3, 4]}
    read = pd.read_csv(tmp_path / "a.csv")
    assert describe("train", read).index == ("Unnamed: 0",)
    assert describe("train", read, columns=["Unnamed: 0"]).info.columns == ("Unnamed: 0",)


@pytest.mark.parametrize(
    "make",
    [dict, pd.DataFrame, pa.table, lambda columns: pa.table(columns).to_pylist()],
)
def test_the_index_is_known_by_its_name_where_the_notes_are_lost(make: Any) -> None:
    source = describe("train", make({"__index_level_0__": [5, 6], "x": [1, 2]}))
    assert (source.info.columns, source.index) == (("x",), ("__index_level_0__",))


def test_the_index_of_json_lines_and_items_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "__index_level_0__": 5}\n')
    assert describe("train", tmp_path).info.columns == ("x",)

    class Items:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> dict[str, int]:
            return {"x": number, "__index_level_0__": number}

    source = describe("train", Items())
    assert source.pieces[0].read(0, 2).to_pydict() == {"x": [0, 1]}


def test_a_transform_gets_no_index(tmp_path: Path) -> None:
    with_index(tmp_path, NAMED, "parquet")
    source = describe("train", tmp_path, transform=dict)
    assert (source.info.columns, source.index) == (("x", "y"), ("key",))


def test_an_index_and_nothing_else_is_a_data_set(tmp_path: Path) -> None:
    pd.DataFrame(index=[5, 6]).to_csv(tmp_path / "a.csv")
    assert describe("train", tmp_path).info.columns == ("",)


def test_one_file_with_notes_is_enough(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pandas(NAMED), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [7], "y": [8]}), tmp_path / "b.parquet")
    assert describe("train", tmp_path).info.columns == ("x", "y")


def test_what_is_left_out_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    configs = {"train": DataConfig(), "valid": DataConfig()}
    data = {"train": NAMED, "valid": pd.DataFrame({"Unnamed: 0": [0], "x": [1]})}
    described(data, configs, needs_train=True, num_workers=1)
    [message] = caplog.messages
    assert "'key' of 'train'; 'Unnamed: 0' of 'valid'" in message
    assert "DataConfig(columns=[…])" in message


def test_the_home_of_nobody() -> None:
    with pytest.raises(SourceError, match=r"x' is below a home directory that isn't known"):
        describe("train", "~no such user/x")


@pytest.mark.parametrize(
    "column", [pa.array([[1], [1]]), pa.array([{"a": 1}] * 2), tensors_of(np.ones((2, 2)))]
)
def test_groups_are_not_reported_by_lists(column: pa.Array) -> None:
    source = describe("train", pa.table({"q": column}))
    with pytest.raises(SourceError, match=r"column 'q' to group by is of type"):
        group_starts(source, "q")


@pytest.mark.parametrize("kind", [pd.DataFrame, dict, list, iter])
def test_columns_that_are_not_read_need_not_fit_into_a_table(kind: Any) -> None:
    rows = [{"x": 1, "mixed": "a", "any": object()}, {"x": 2, "mixed": 2, "any": object()}]
    by_name = {name: [row[name] for row in rows] for name in rows[0]}

    def data() -> Any:
        return kind(rows if kind in (list, iter) else by_name)

    [piece] = describe("train", data(), columns=["x"]).pieces
    assert piece.read(0, 2).to_pydict() == {"x": [1, 2]}
    with pytest.raises(SourceError, match=r"'any'|'mixed'|column mixed"):
        describe("train", data())
    with pytest.raises(SourceError, match=r"no column 'y'. .*x, mixed, any"):
        describe("train", data(), columns=["y"])
