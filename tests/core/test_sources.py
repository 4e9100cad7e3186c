"""Data sets as users give them: files of all kinds, frames, tables, arrays; and what is refused."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polytrain.data.assignment import assign, read
from polytrain.data.reader import column_to_numpy
from polytrain.data.sources import SourceError, describe

ROWS = 23
"""A prime number: no world size divides it."""


def table(start: int = 0, stop: int = ROWS) -> pa.Table:
    numbers = list(range(start, stop))
    return pa.table({"id": numbers, "half": [n / 2 for n in numbers]})


def write_parquet_files(directory: Path, *, row_group_size: int = 4) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for part, (start, stop) in enumerate([(0, 10), (10, 11), (11, ROWS)]):
        pq.write_table(
            table(start, stop), directory / f"part-{part}.parquet", row_group_size=row_group_size
        )


def write_csv(path: Path, start: int = 0, stop: int = ROWS) -> None:
    path.write_text("id,half\n" + "".join(f"{n},{n / 2}\n" for n in range(start, stop)))


def ids(data: Any, world_size: int = 1, *, whole: bool = False) -> list[list[int]]:
    """The column "id" as each rank reads it."""
    source = describe("train", data)
    shards = [read(assign(source, world_size, rank, whole=whole)) for rank in range(world_size)]
    return [shard.column("id").to_pylist() for shard in shards]


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


def csv_files(tmp: Path) -> Any:
    write_csv(tmp / "a.csv", 0, 9)
    write_csv(tmp / "b.csv", 9, ROWS)
    return str(tmp / "*.csv")


def compressed_csv(tmp: Path) -> Any:
    write_csv(tmp / "plain")
    (tmp / "all.csv.gz").write_bytes(gzip.compress((tmp / "plain").read_bytes()))
    return tmp / "all.csv.gz"


def frame(tmp: Path) -> Any:
    return table().to_pandas().set_index(pd.Index([7] * ROWS, name="index"))


def arrow(tmp: Path) -> Any:
    return pa.concat_tables([table(0, 5), table(5, ROWS)])


def arrays(tmp: Path) -> Any:
    return {"id": np.arange(ROWS), "half": [n / 2 for n in range(ROWS)]}


EVERY_KIND = [
    parquet_directory,
    parquet_glob,
    parquet_list,
    one_parquet_file,
    odd_names,
    file_url,
    csv_files,
    compressed_csv,
    frame,
    arrow,
    arrays,
]


@pytest.fixture(params=EVERY_KIND, ids=lambda make: make.__name__)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    make: Callable[[Path], Any] = request.param
    return make(tmp_path)


def test_a_source_knows_its_rows_and_columns(data: Any) -> None:
    info = describe("train", data).info
    assert (info.name, info.num_rows, info.columns) == ("train", ROWS, ("id", "half"))


@pytest.mark.parametrize("world_size", [1, 2, 5, 23, 30])
def test_every_row_is_read_by_exactly_one_rank(data: Any, world_size: int) -> None:
    shards = ids(data, world_size)
    assert [row for shard in shards for row in shard] == list(range(ROWS))


def test_whole_data_sets_are_read_by_every_rank(data: Any) -> None:
    assert ids(data, 3, whole=True) == [list(range(ROWS))] * 3


def test_columns_arrive_together(data: Any) -> None:
    shard = read(assign(describe("train", data), 3, 1, whole=False))
    assert shard.column("half").to_pylist() == [n / 2 for n in shard.column("id").to_pylist()]


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, start in (("b", 5), ("a", 0), ("c", 9)):
        pq.write_table(table(start, start + 2), tmp_path / f"{name}.parquet")
    assert ids(tmp_path) == [[0, 1, 5, 6, 9, 10]]


def test_a_list_is_read_in_its_own_order(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", 0, 2)
    write_csv(tmp_path / "b.csv", 2, 4)
    assert ids([tmp_path / "b.csv", tmp_path / "a.csv"]) == [[2, 3, 0, 1]]


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, with another working directory, reads the same file."""
    write_csv(tmp_path / "here.csv")
    monkeypatch.chdir(tmp_path)
    source = describe("train", "here.csv")
    monkeypatch.chdir("/")
    assert read(assign(source, 1, 0, whole=True)).num_rows == ROWS


def test_columns_in_another_order_in_another_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [4], "x": [3]}), tmp_path / "b.parquet")
    shards = [read(assign(describe("d", tmp_path), 2, rank, whole=False)) for rank in (0, 1)]
    assert [shard.to_pydict() for shard in shards] == [{"x": [1], "y": [2]}, {"x": [3], "y": [4]}]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_ranks_agree_on_the_types_of_columns(tmp_path: Path, suffix: str) -> None:
    """One file holds whole numbers only: every rank gets the column in the type that holds all."""
    for name, values in (("a", [1, 2]), ("b", [1.5, 2.5])):
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "csv":
            path.write_text("x\n" + "".join(f"{value}\n" for value in values))
        else:
            pq.write_table(pa.table({"x": values}), path)
    source = describe("train", tmp_path)
    shards = [read(assign(source, 3, rank, whole=False)) for rank in range(3)]
    assert {str(shard.schema.field("x").type) for shard in shards} == {"double"}
    assert [x for shard in shards for x in shard.column("x").to_pylist()] == [1, 2, 1.5, 2.5]


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
@pytest.mark.parametrize("shape", [(6, 3), (6, 2, 2)])
def test_arrays_of_several_dimensions(dtype: Any, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)
    source = describe("train", {"image": array, "label": np.arange(len(array))})
    parts = [
        column_to_numpy(read(assign(source, 2, rank, whole=False)).column("image"))
        for rank in (0, 1)
    ]
    assert [part.dtype for part in parts] == [array.dtype] * 2
    np.testing.assert_array_equal(np.concatenate(parts), array)


def garbage(tmp: Path) -> Any:
    (tmp / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    return tmp / "torn.parquet"


def empty_csv(tmp: Path) -> Any:
    (tmp / "empty.csv").touch()
    return tmp / "empty.csv"


def differing_columns(tmp: Path) -> Any:
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp / "a.parquet")
    pq.write_table(pa.table({"x": [1], "z": [2]}), tmp / "b.parquet")
    return tmp


def differing_types(tmp: Path) -> Any:
    (tmp / "a.csv").write_text("x\n1\n")
    (tmp / "b.csv").write_text("x\nred\n")
    return tmp


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no match": (lambda tmp: f"{tmp}/nothing-*.parquet", "no file matches .*nothing-"),
    "empty directory": (lambda tmp: tmp, "no file matches"),
    "another format": (lambda tmp: __file__, "neither .parquet nor .csv"),
    "remote": (lambda tmp: "s3://bucket/train", "not on a file system"),
    "torn file": (garbage, r"torn\.parquet' can't be read"),
    "file without a byte": (empty_csv, r"empty\.csv' can't be read"),
    "no rows in a frame": (lambda tmp: pd.DataFrame({"x": []}), "no rows"),
    "no rows in arrays": (lambda tmp: {"x": []}, "no rows"),
    "no arrays": (lambda tmp: {}, "no rows"),
    "no rows in a table": (lambda tmp: table(0, 0), "no rows"),
    "differing columns": (differing_columns, r"b\.parquet' differs .*\['y', 'z'\]"),
    "differing types": (differing_types, "x"),
    "differing lengths": (lambda tmp: {"x": [1], "y": [1, 2]}, "x: 1, y: 2"),
    "a scalar": (lambda tmp: {"x": 5}, "x"),
    "ragged rows": (lambda tmp: {"x": [[1], [1, 2]]}, "x"),
    "a column of anything": (lambda tmp: pd.DataFrame({"mix": [1, "b", None]}), "mix"),
    "columns of one name": (lambda tmp: pd.DataFrame([[1, 2]], columns=["a", "a"]), "a"),
    "a number": (lambda tmp: 42, "builtins.int is not a data set"),
    "an empty list": (lambda tmp: [], "not a data set"),
    "a series": (lambda tmp: pd.Series([1]), "Series is not a data set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_set_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", make(tmp_path))
    assert caught.value.remedy
    assert len(caught.value.what) < 500
