"""Data sets as users give them: what each kind becomes, and what is refused."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from polytrain.data.fingerprint import digests, facts
from polytrain.data.plan.position import differences
from polytrain.data.read.describe import Source, describe
from polytrain.data_errors import SourceError

ROWS = 23
"""A prime number: nothing divides it."""


HALF = 2
"""Another number makes other rows."""


def table(start: int = 0, stop: int = ROWS) -> pa.Table:
    numbers = list(range(start, stop))
    return pa.table({"id": numbers, "half": [n / HALF for n in numbers]})


def write_parquet_files(directory: Path, *, row_group_size: int = 4) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for part, (start, stop) in enumerate([(0, 10), (10, 11), (11, ROWS)]):
        pq.write_table(
            table(start, stop), directory / f"part-{part}.parquet", row_group_size=row_group_size
        )


def write_csv(path: Path, start: int = 0, stop: int = ROWS) -> None:
    path.write_text("id,half\n" + "".join(f"{n},{n / HALF}\n" for n in range(start, stop)))


def read(source: Source, columns: list[str] | None = None) -> pa.Table:
    """All rows, as another process reads them."""
    pieces = pickle.loads(pickle.dumps(source.pieces))
    return pa.concat_tables([piece.read(0, piece.rows, columns) for piece in pieces])


def parquet_directory(tmp: Path) -> Any:
    write_parquet_files(tmp / "data")
    # What belongs to nobody's data set lies in such directories, too.
    (tmp / "data" / "_SUCCESS").touch()
    return tmp / "data"


def parquet_glob(tmp: Path) -> Any:
    write_parquet_files(tmp / "data")
    return str(tmp / "data" / "*.parquet")


def parquet_list(tmp: Path) -> Any:
    write_parquet_files(tmp)
    return [tmp / "part-0.parquet", str(tmp / "part-[12].parquet")]


def one_parquet_file(tmp: Path) -> Any:
    pq.write_table(table(), tmp / "all.parquet", row_group_size=5)
    return tmp / "all.parquet"


def odd_names(tmp: Path) -> Any:
    write_parquet_files(tmp / "été à [Genève] 100%")
    return str(tmp / "été à [Genève] 100%")


def file_url(tmp: Path) -> Any:
    return f"file://{one_parquet_file(tmp)}"


def encoded_file_url(tmp: Path) -> Any:
    return Path(odd_names(tmp)).as_uri()


def csv_files(tmp: Path) -> Any:
    write_csv(tmp / "a.csv", 0, 9)
    write_csv(tmp / "b.csv", 9, ROWS)
    return str(tmp / "*.csv")


def compressed_csv(tmp: Path) -> Any:
    write_csv(tmp / "plain")
    (tmp / "all.csv.gz").write_bytes(gzip.compress((tmp / "plain").read_bytes(), mtime=0))
    return tmp / "all.csv.gz"


def arrow_files(tmp: Path) -> Any:
    for name, rows, compression in (("a.arrow", (0, 9), "lz4"), ("b.feather", (9, ROWS), None)):
        written = table(*rows)
        with pa.ipc.new_file(
            tmp / name, written.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        ) as file:
            file.write_table(written, max_chunksize=4)
    return tmp


def json_lines(tmp: Path) -> Any:
    lines = [json.dumps(row) + "\n" for row in table().to_pylist()]
    (tmp / "a.jsonl").write_text("".join(lines[:9]))
    (tmp / "b.ndjson.gz").write_bytes(gzip.compress("".join(lines[9:]).strip().encode(), mtime=0))
    return tmp


def dicts(tmp: Path) -> Any:
    return table().to_pylist()


def pandas_frame(tmp: Path) -> Any:
    return table().to_pandas().set_index(pd.Index([7] * ROWS, name="index"))


def arrow_table(tmp: Path) -> Any:
    return pa.concat_tables([table(0, 5), table(5, ROWS)])


def record_batch(tmp: Path) -> Any:
    return table().to_batches()[0]


def record_batch_reader(tmp: Path) -> Any:
    return table().to_reader(max_chunksize=4)


def polars_frame(tmp: Path) -> Any:
    return pl.DataFrame(table())


def polars_query(tmp: Path) -> Any:
    return pl.LazyFrame({"id": range(ROWS)}).with_columns(half=pl.col("id") / HALF)


class Exporter:
    """Any library's table."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return table().__arrow_c_stream__(requested_schema)


def arrow_stream(tmp: Path) -> Any:
    return Exporter()


def arrays(tmp: Path) -> Any:
    return {"id": np.arange(ROWS), "half": [n / HALF for n in range(ROWS)]}


def arrow_dataset(tmp: Path) -> Any:
    return pads.dataset(parquet_directory(tmp))


def hugging_face(tmp: Path) -> Any:
    twice = [*range(ROWS - 1, -1, -1), *range(ROWS)]
    # Which rows, and in which order, is kept beside the table.
    return datasets.Dataset.from_dict({"id": twice, "half": [n / HALF for n in twice]}).select(
        range(ROWS, 2 * ROWS)
    )


class Items:
    """A map-style data set."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "half": np.float64(index / HALF)}


def items(tmp: Path) -> Any:
    return Items()


EVERY_KIND = [
    parquet_directory,
    parquet_glob,
    parquet_list,
    one_parquet_file,
    odd_names,
    file_url,
    encoded_file_url,
    csv_files,
    compressed_csv,
    arrow_files,
    json_lines,
    dicts,
    pandas_frame,
    arrow_table,
    record_batch,
    record_batch_reader,
    polars_frame,
    polars_query,
    arrow_stream,
    arrays,
    arrow_dataset,
    hugging_face,
    items,
]


@pytest.fixture(params=EVERY_KIND, ids=lambda make: make.__name__)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    make: Callable[[Path], Any] = request.param
    return make(tmp_path)


def test_a_source_knows_its_rows_and_columns(data: Any) -> None:
    info = describe("train", data).info
    assert (info.name, info.num_rows, info.columns) == ("train", ROWS, ("id", "half"))


def test_its_rows_are_read_in_order(data: Any) -> None:
    source = describe("train", data)
    assert read(source).to_pydict() == table().to_pydict()
    assert read(source).schema.equals(source.schema)


@pytest.mark.parametrize("make", EVERY_KIND, ids=lambda make: make.__name__)
def test_its_rows_are_known_again(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made anew, and files also elsewhere, they are the same; with other values they aren't."""

    def known(directory: str, **config: Any) -> dict[str, str]:
        (tmp_path / directory).mkdir()
        source = describe("train", make(tmp_path / directory), **config)
        return facts(source, digests(source))

    before = known("one")
    assert differences(before, known("again")) == []
    monkeypatch.setattr(sys.modules[__name__], "HALF", 4)
    [*found] = differences(before, known("other"))
    # Items are known by their number alone.
    assert bool(found) == (make is not items), found


@pytest.mark.parametrize("columns", [["half"], ["half", "id"]])
def test_columns_are_read_alone_and_in_any_order(data: Any, columns: list[str]) -> None:
    source = describe("train", data)
    assert read(source, columns).to_pydict() == table().select(columns).to_pydict()


def test_any_rows_of_a_piece_can_be_read(data: Any) -> None:
    """Cut in all ways that there are: each row comes once, wherever pieces are divided."""
    for piece in describe("train", data).pieces:
        whole = piece.read(0, piece.rows)
        for start in range(piece.rows + 1):
            for stop in range(start, piece.rows + 1):
                part = piece.read(start, stop, ["id"])
                assert part.column("id").to_pylist() == whole.column("id").to_pylist()[start:stop]
                assert part.schema.types == [whole.schema.field("id").type]


def test_only_some_columns_are_wanted(data: Any) -> None:
    source = describe("train", data, columns=["half"])
    assert source.info.columns == tuple(source.schema.names) == ("half",)
    assert read(source).to_pydict() == {"half": table().column("half").to_pylist()}


def test_a_misspelt_column_is_found(data: Any) -> None:
    with pytest.raises(SourceError, match="no column 'Haif'") as caught:
        describe("train", data, columns=["id", "Haif"])
    assert "'half'" in caught.value.remedy


def test_a_column_is_wanted_twice(data: Any) -> None:
    with pytest.raises(SourceError, match=r"'id'.* more than once"):
        describe("train", data, columns=["id", "half", "id"])


def test_pieces_say_where_they_lie(data: Any) -> None:
    assert all(piece.where for piece in describe("train", data).pieces)


@pytest.mark.parametrize("columns", ["id", [], [1]])
def test_columns_are_a_list_of_names(columns: Any) -> None:
    with pytest.raises(SourceError, match="columns"):
        describe("train", table(), columns=columns)


def garbage(tmp: Path) -> Any:
    (tmp / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    return tmp / "torn.parquet"


def truncated(tmp: Path) -> Any:
    whole = one_parquet_file(tmp).read_bytes()
    (tmp / "half.parquet").write_bytes(whole[: len(whole) // 2])
    return tmp


def empty_file(name: str) -> Callable[[Path], Any]:
    def make(tmp: Path) -> Any:
        (tmp / name).touch()
        return tmp / name

    return make


def arrow_stream_file(tmp: Path) -> Any:
    with pa.ipc.new_stream(tmp / "stream.arrow", table().schema) as stream:
        stream.write_table(table())
    return tmp / "stream.arrow"


def only_a_readme(tmp: Path) -> Any:
    (tmp / "README.txt").touch()
    return tmp


def files_without_rows(tmp: Path) -> Any:
    pq.write_table(table(0, 0), tmp / "a.parquet")
    pq.write_table(table(0, 0), tmp / "b.parquet")
    return tmp


def differing_columns(tmp: Path) -> Any:
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp / "a.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp / "b.parquet")
    return tmp


def differing_types(tmp: Path) -> Any:
    (tmp / "a.csv").write_text("x\n1\n")
    (tmp / "b.csv").write_text("x\nred\n")
    return tmp


def failing_query(tmp: Path) -> Any:
    return pl.LazyFrame({"x": [1]}).select(pl.col("y"))


def columns_of_one_name(tmp: Path) -> Any:
    (tmp / "a.csv").write_text("x,y,x\n1,2,3\n")
    return tmp


def streamed(tmp: Path) -> Any:
    return datasets.IterableDataset.from_generator(lambda: iter([{"x": 1}]))


def with_function(tmp: Path) -> Any:
    return datasets.Dataset.from_dict({"x": [1]}).with_transform(lambda batch: batch)


class Tensor:
    """What torch's own looks like from outside."""

    dtype = "torch.float32"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


Tensor.__module__ = "torch"


class Loader:
    """What torch's own loaders and iterable data sets look like from outside."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it may have no end")


Loader.__module__ = "torch.utils.data.dataloader"

REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no match": (lambda tmp: f"{tmp}/nothing-*.parquet", "no file matches .*nothing-"),
    "no file": (lambda tmp: f"{tmp}/nothing.parquet", r"no file matches .*nothing\.parquet"),
    "empty directory": (lambda tmp: tmp, "directory .* has no data files"),
    "directory without data": (only_a_readme, r"none of the 1 files .*README\.txt"),
    "another format": (lambda tmp: __file__, "neither .parquet nor .csv"),
    "misspelt scheme": (lambda tmp: "s4://bucket/train", "s4://.* Did you mean s3://"),
    "unknown scheme": (lambda tmp: "qqqq://bucket/train", "qqqq://"),
    "torn file": (garbage, r"torn\.parquet' can't be read"),
    "truncated file": (truncated, r"half\.parquet' can't be read"),
    "a stream in a file": (arrow_stream_file, r"stream\.arrow' can't be read"),
    "CSV file without a byte": (empty_file("empty.csv"), r"empty\.csv' can't be read"),
    "Parquet file without a byte": (empty_file("empty.parquet"), r"empty\.parquet' can't be read"),
    "no rows in files": (files_without_rows, "2 file.* no rows"),
    "no rows in a frame": (lambda tmp: pd.DataFrame({"x": []}), "no rows"),
    "no rows in arrays": (lambda tmp: {"x": []}, "no rows"),
    "no arrays": (lambda tmp: {}, "no rows"),
    "no rows in a table": (lambda tmp: table(0, 0), "no rows"),
    "differing columns": (differing_columns, r"b\.parquet' has no column 'y'.*a\.parquet'"),
    "differing types": (differing_types, r"'x' is int64 in .*a\.csv' and string in .*b\.csv'"),
    "differing lengths": (lambda tmp: {"x": [1], "y": [1, 2]}, "x: 1, y: 2"),
    "a scalar": (lambda tmp: {"x": 5}, "x"),
    "lists of anything": (lambda tmp: {"x": [[1], ["a"]]}, "x"),
    "rows of nothing": (lambda tmp: {"x": np.empty((3, 0))}, "'x' has rows without values"),
    "a column of anything": (lambda tmp: pd.DataFrame({"mix": [1, "b", None]}), "mix"),
    "columns of one name": (lambda tmp: pd.DataFrame([[1, 2]], columns=["a", "a"]), "a"),
    "columns of one name in a file": (columns_of_one_name, r"a\.csv' has more than one column 'x'"),
    "columns of one name in a table": (
        lambda tmp: pa.table([[1], [2]], names=["a", "a"]),
        "more than one column 'a'",
    ),
    "a failing query": (failing_query, "LazyFrame can't be collected"),
    "a number": (lambda tmp: 42, "an int is not a data set"),
    "an empty list": (lambda tmp: [], "the list is empty"),
    "a list of numbers": (lambda tmp: [1, 2], "item 0 is an int, not a dict"),
    "a set of numbers": (lambda tmp: {1, 2}, "item 0 is an int, not a dict"),
    "a series": (lambda tmp: pd.Series([1]), "Series is not a data set"),
    "a polars series": (lambda tmp: pl.Series([1]), "Series is not a data set"),
    "an array": (lambda tmp: np.ones((2, 2)), "ndarray is not a data set"),
    "a data loader": (lambda tmp: Loader(), "Loader is not a data set"),
    "an Arrow array": (lambda tmp: pa.array([1]), "Int64Array is not a data set"),
    "Arrow arrays": (lambda tmp: pa.chunked_array([[1]]), "ChunkedArray is not a data set"),
    "a tensor": (lambda tmp: Tensor(), "Tensor is not a data set"),
    "several data sets": (
        lambda tmp: datasets.DatasetDict(test=datasets.Dataset.from_dict({"x": [1]})),
        r"DatasetDict, .*'test'.*dataset\['test'\]",
    ),
    "a stream": (streamed, "IterableDataset .* without streaming"),
    "a Hugging Face function": (with_function, "with_transform.* transform"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_set_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", make(tmp_path))
    assert caught.value.remedy
    assert len(caught.value.what) < 600


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("a.orc", "pyarrow.dataset.dataset"),
        ("a.json", "rename it to .jsonl"),
        ("shard-0.tar", "ray.data.read_webdataset"),
        ("cat/1.jpg", "ImageFolder"),
        ("cat/1.webp", "ImageFolder"),
        ("shard-0.tgz", "ray.data.read_webdataset"),
        ("a.tfrecord", "ray.data.read_tfrecords"),
        ("a.npy", "np.load"),
        ("a.txt", "ray.data.read_text"),
        ("a.xlsx", "pandas.read_excel"),
        ("a.arrows", "pyarrow.ipc.open_stream"),
    ],
)
def test_files_of_other_formats_have_another_way(name: str, way: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(SourceError) as caught:
            describe("train", place)
        assert way in caught.value.remedy


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: np.ones(3), '{"x": …}'),
        (lambda: pd.Series([1]), '{"x": …}'),
        (lambda: Tensor(), '{"x": …}'),
        (lambda: Loader(), "prepare_data_loader"),
    ],
)
def test_what_is_one_column_or_a_loader_has_another_way(make: Callable[[], Any], way: str) -> None:
    with pytest.raises(SourceError) as caught:
        describe("train", make())
    assert way in caught.value.remedy


def test_an_error_survives_pickling_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        describe("train", garbage(tmp_path))
    there = pickle.loads(pickle.dumps(caught.value))
    assert (there.what, there.remedy) == (caught.value.what, caught.value.remedy)
    assert isinstance(there.__cause__, pa.ArrowInvalid)


def test_a_stream_is_read_once() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal begun
        begun += 1
        yield from table().to_batches()

    begun = 0
    source = describe("train", pa.RecordBatchReader.from_batches(table().schema, batches()))
    assert (begun, read(source).num_rows) == (1, ROWS)
