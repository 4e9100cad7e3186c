"""Data sets in files: which files they are, and how these are brought together."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from polytrain.data.read import parquet_files
from polytrain.data.read.describe import Source, describe
from polytrain.data.read.expansion import expand
from polytrain.data.read.file_pieces import FileVersion
from polytrain.data.read.parquet_files import RowGroupPiece
from polytrain.data_errors import ReadError, SourceError


def read(source: Source) -> dict[str, list[Any]]:
    pieces = pickle.loads(pickle.dumps(source.pieces))
    tables = [piece.read(0, piece.rows) for piece in pieces]
    result: dict[str, list[Any]] = pa.concat_tables(tables).to_pydict()
    return result


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, start in (("b", 5), ("a", 0), ("c", 9)):
        write(tmp_path / f"{name}.parquet", x=[start])
    assert read(describe("train", tmp_path)) == {"x": [0, 5, 9]}


def test_a_list_is_read_in_its_own_order(tmp_path: Path) -> None:
    b, a = (write(tmp_path / f"{name}.parquet", x=[name]) for name in "ba")
    assert read(describe("train", [b, a, b])) == {"x": ["b", "a", "b"]}


@pytest.mark.parametrize("passed", [str, pads.dataset])
def test_a_relative_path_is_made_absolute(
    passed: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, with another working directory, reads the same file."""
    write(tmp_path / "here.parquet", x=[1])
    monkeypatch.chdir(tmp_path)
    source = describe("train", passed("here.parquet"))
    monkeypatch.chdir("/")
    assert read(source) == {"x": [1]}


def test_runs_that_are_stored_beside_the_data_are_no_data(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=[1])
    write(tmp_path / "run" / "checkpoints" / "predictions.parquet", x=[2])
    (tmp_path / "run" / "journal.jsonl").write_text('{"event": "Opened"}\n')
    write(tmp_path / "run_b.parquet", x=[3])
    assert read(describe("train", tmp_path)) == {"x": [1, 3]}


TREE = (
    "a.parquet",
    "b/c/d.parquet",
    "b/e.parquet",
    "b/notes.txt",
    "_temporary/f.parquet",
    ".hidden/g.parquet",
    "b/_h.parquet",
    "b/.i.parquet",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, x=[name])
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["a.parquet", "b/c/d.parquet", "b/e.parquet"]),
        ("*", ["a.parquet", "b/c/d.parquet", "b/e.parquet"]),
        ("**", ["a.parquet", "b/c/d.parquet", "b/e.parquet"]),
        ("*.parquet", ["a.parquet"]),
        ("**/*.parquet", ["a.parquet", "b/c/d.parquet", "b/e.parquet"]),
        ("b/**/d.parquet", ["b/c/d.parquet"]),
        ("*/*", ["b/c/d.parquet", "b/e.parquet"]),
        ("[b-z]", ["b/c/d.parquet", "b/e.parquet"]),
        ("?/?.parquet", ["b/e.parquet"]),
        ("_*/*.parquet", ["_temporary/f.parquet"]),
        ("b/_h.parquet", ["b/_h.parquet"]),
    ],
)
def test_directories_and_globs(tree: Path, pattern: str, expected: list[str]) -> None:
    assert read(describe("train", f"{tree}/{pattern}")) == {"x": expected}


COPIES = (
    "a.parquet.bak",
    "a.parquet.tmp.1234",
    "a.parquet~",
    "a.csv.orig",
    "a.parquet.crc",
    "parquet",
    "a.parquet.d/readme.txt",
)


@pytest.mark.parametrize("pattern", ["", "*", "a.*", "**"])
def test_copies_beside_the_files_are_no_data(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a.parquet", x=[1])
    for name in COPIES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n2\n")
    assert read(describe("train", f"{tmp_path}/{pattern}")) == {"x": [1]}


@pytest.mark.parametrize(
    "name",
    [
        *("a.parquet.gzip", "a.parquet.snappy", "a.snappy.parquet", "a.parquet.brotli", "a.parq"),
        *("part-00000", "000000_0", "day=1/part-00000"),
    ],
)
def test_parquet_files_have_many_names(tmp_path: Path, name: str) -> None:
    file = tmp_path / "data" / name
    file.parent.mkdir(parents=True)
    codec = "gzip" if "gzip" in name else "snappy"
    pq.write_table(pa.table({"x": [1]}), file, compression=codec)
    (tmp_path / "data" / "_SUCCESS").touch()
    (tmp_path / "data" / "README").write_text("x")
    for place in (tmp_path / "data", file, f"{file.parent}/*"):
        assert read(describe("train", place))["x"] == [1]


def test_an_arrow_file_may_have_no_ending(tmp_path: Path) -> None:
    table = pa.table({"x": [1]})
    with pa.ipc.new_file(tmp_path / "part-0", table.schema) as file:
        file.write_table(table)
    assert read(describe("train", tmp_path)) == {"x": [1]}


def test_text_without_an_ending_needs_one(tmp_path: Path) -> None:
    (tmp_path / "part-00000").write_text("x\n1\n")
    for place in (tmp_path, tmp_path / "part-00000"):
        with pytest.raises(SourceError, match="part-00000") as caught:
            describe("train", place)
        assert "add .csv to its name" in caught.value.remedy


def test_what_lies_beside_files_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=[1])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "locked").touch(mode=0)
    for place in (tmp_path, f"{tmp_path}/*"):
        assert read(describe("train", place)) == {"x": [1]}


@pytest.mark.parametrize("ending", ["gz", "gzip", "bz2", "zst", "zstd", "lz4", "br", "GZ"])
def test_compressed_files_have_two_endings(tmp_path: Path, ending: str) -> None:
    codec = {"gz": "gzip", "zst": "zstd", "br": "brotli"}.get(ending.lower(), ending)
    with pa.CompressedOutputStream(str(tmp_path / f"a.csv.{ending.lower()}"), codec) as file:
        file.write(b"x\n1\n")
    (tmp_path / f"a.csv.{ending.lower()}").rename(tmp_path / f"a.csv.{ending}")
    assert read(describe("train", tmp_path)) == {"x": [1]}


@pytest.mark.parametrize("pattern", ["", "*", "a.csv*"])
@pytest.mark.parametrize("first", ["a.csv", "a.csv.bz2"])
def test_a_file_and_its_compressed_copy_are_refused(
    tmp_path: Path, pattern: str, first: str
) -> None:
    """As `gzip --keep` leaves them: the same rows twice."""
    for name in (first, "a.csv.gz"):
        with pa.output_stream(str(tmp_path / name)) as file:
            file.write(b"x\n1\n")
    with pytest.raises(SourceError, match=r"a\.csv.*' and '.*a\.csv\.gz'.*twice"):
        describe("train", f"{tmp_path}/{pattern}")
    both = [str(tmp_path / first), str(tmp_path / "a.csv.gz")]
    assert read(describe("train", both)) == {"x": [1, 1]}, "whoever names both means both"


@pytest.mark.parametrize("pattern", ["", "*", "a.*"])
def test_files_of_two_formats_are_refused(tmp_path: Path, pattern: str) -> None:
    """They may well be the same rows twice."""
    write(tmp_path / "a.parquet", x=[1])
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(SourceError, match=r"a\.csv' and '.*a\.parquet'") as caught:
        describe("train", f"{tmp_path}/{pattern}")
    assert "*.parquet" in caught.value.remedy
    assert read(describe("train", [tmp_path / "a.parquet", tmp_path / "a.csv"])) == {"x": [1, 1]}


@pytest.mark.parametrize(
    ("sign", "kind"),
    [
        ("_delta_log/0000.json", "Delta"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"),
    ],
)
@pytest.mark.parametrize("pattern", ["", "**"])
def test_tables_with_a_log_of_their_files_are_refused(
    tmp_path: Path, sign: str, kind: str, pattern: str
) -> None:
    write(tmp_path / "t" / "day=1" / "a.parquet", x=[1])
    (tmp_path / "t" / sign).parent.mkdir()
    (tmp_path / "t" / sign).touch()
    with pytest.raises(SourceError, match=rf"t'? .*{kind}'s format") as caught:
        describe("train", f"{tmp_path}/{pattern}")
    assert "list of files" in caught.value.remedy
    assert read(describe("train", [tmp_path / "t" / "day=1" / "a.parquet"]))["x"] == [1]


@pytest.mark.parametrize("pattern", ["", "*", "**", "**/*.parquet", "*/*.parquet"])
def test_links_are_followed_once(tmp_path: Path, pattern: str) -> None:
    data = tmp_path / "data"
    write(data / "v1" / "a.parquet", x=[1])
    write(tmp_path / "elsewhere" / "b.parquet", x=[2])
    (data / "latest").symlink_to("v1")
    (data / "v1" / "loop").symlink_to(".")
    (data / "v1" / "up").symlink_to("..")
    (data / "other").symlink_to(tmp_path / "elsewhere")
    (data / "v1" / "same.parquet").symlink_to("a.parquet")
    found = [file.place for file in expand(f"{data}/{pattern}")]
    assert found == [f"{data}/other/b.parquet", f"{data}/v1/a.parquet"]


def test_links_to_files_of_a_store(tmp_path: Path) -> None:
    """Files with the same content are one file there."""
    write(tmp_path / "blobs" / "123", x=[1])
    (tmp_path / "data").mkdir()
    for name in "ab":
        (tmp_path / "data" / f"{name}.parquet").symlink_to(tmp_path / "blobs" / "123")
    assert read(describe("train", tmp_path / "data")) == {"x": [1, 1]}


@pytest.mark.parametrize("pattern", ["", "*.parquet"])
def test_a_link_to_nothing_is_reported(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a.parquet", x=[1])
    (tmp_path / "b.parquet").symlink_to("gone.parquet")
    with pytest.raises(SourceError, match=r"link '.*b\.parquet' leads to no file"):
        describe("train", f"{tmp_path}/{pattern}")


def test_a_path_below_an_unknown_home_is_refused() -> None:
    with pytest.raises(SourceError, match="below a home directory that isn't known"):
        describe("train", "~nobody-of-this-name/x")


@pytest.mark.parametrize("place", ["", " ", "file://"])
def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write(tmp_path / "a.parquet", x=[1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="path is empty"):
        describe("train", place)
    assert read(describe("train", ".")) == {"x": [1]}


def write_partitions(directory: Path) -> None:
    for year in ("2023", "2024"):
        for place in ("K%C3%B6ln", "__HIVE_DEFAULT_PARTITION__"):
            write(directory / f"year={year}" / f"place={place}" / "part.parquet", x=[int(year)])


PARTITIONED = {
    "x": [2023, 2023, 2024, 2024],
    "year": [2023, 2023, 2024, 2024],
    "place": ["Köln", None, "Köln", None],
}


@pytest.mark.parametrize("pattern", ["", "*", "**/*.parquet", "year=*/place=*/*"])
def test_directories_names_give_columns(tmp_path: Path, pattern: str) -> None:
    write_partitions(tmp_path)
    source = describe("train", f"{tmp_path}/{pattern}")
    assert read(source) == PARTITIONED
    # As Arrow does it.
    whole = pads.dataset(tmp_path, partitioning="hive").to_table()
    assert read(source) == whole.to_pydict()
    assert source.schema.equals(whole.schema)


def test_lists_of_files_have_the_columns_of_their_directories(tmp_path: Path) -> None:
    write_partitions(tmp_path)
    assert read(describe("train", sorted(tmp_path.rglob("*.parquet")))) == PARTITIONED


def test_a_directory_below_gives_only_what_is_below_it(tmp_path: Path) -> None:
    write_partitions(tmp_path)
    assert describe("train", tmp_path / "year=2023").info.columns == ("x", "place")
    one = tmp_path / "year=2023" / "place=K%C3%B6ln" / "part.parquet"
    assert describe("train", one).info.columns == ("x",)


@pytest.mark.parametrize("columns", [["year"], ["place", "x"]])
def test_columns_of_directories_alone(tmp_path: Path, columns: list[str]) -> None:
    write_partitions(tmp_path)
    source = describe("train", tmp_path, columns=columns)
    assert read(source) == {name: PARTITIONED[name] for name in columns}
    assert source.pieces[0].read(0, 1, columns[:1]).column_names == columns[:1]


def test_csv_files_in_such_directories(tmp_path: Path) -> None:
    for year in (2023, 2024):
        (tmp_path / f"year={year}").mkdir()
        (tmp_path / f"year={year}" / "a.csv").write_text(f"x\n{year}\n{year + 1}\n")
    assert read(describe("train", tmp_path)) == {
        "x": [2023, 2024, 2024, 2025],
        "year": [2023, 2023, 2024, 2024],
    }
    assert read(describe("train", tmp_path, columns=["year"])) == {"year": [2023] * 2 + [2024] * 2}


def test_a_column_that_a_file_has_itself(tmp_path: Path) -> None:
    write(tmp_path / "year=2023" / "a.parquet", x=[1], year=[2023])
    assert read(describe("train", tmp_path)) == {"x": [1], "year": [2023]}


def test_columns_in_another_order_in_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=[1], y=[2])
    write(tmp_path / "b.parquet", y=[4], x=[3])
    assert read(describe("train", tmp_path)) == {"x": [1, 3], "y": [2, 4]}


TYPES = [
    (pa.array([1], pa.int32()), pa.array([2**40]), pa.int64(), [1, 2**40]),
    (pa.array([1]), pa.array([1.5]), pa.float64(), [1.0, 1.5]),
    (pa.array([0.5], pa.float32()), pa.array([0.1]), pa.float64(), [0.5, 0.1]),
    (pa.array([None]), pa.array(["a"]), pa.string(), [None, "a"]),
    (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), pa.string(), ["a", "b"]),
    (pa.array(["a"], pa.large_string()), pa.array(["b"]), pa.large_string(), ["a", "b"]),
]


@pytest.mark.parametrize(("one", "other", "expected", "values"), TYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_types_that_hold_both_files(
    tmp_path: Path, one: pa.Array, other: pa.Array, expected: Any, values: Any, turned: bool
) -> None:
    """Every piece is read in them, whichever file it is from."""
    columns = [other, one] if turned else [one, other]
    for name, column in zip("ab", columns, strict=True):
        write(tmp_path / f"{name}.parquet", x=column)
    source = describe("train", tmp_path)
    assert [piece.read(0, 1).schema.field("x").type for piece in source.pieces] == [expected] * 2
    assert read(source) == {"x": values[::-1] if turned else values}


def test_types_that_differ_name_the_files_that_they_are_from(tmp_path: Path) -> None:
    for name, value in (("a", None), ("b", 1), ("c", "red")):
        write(tmp_path / f"{name}.parquet", x=[value], y=[0])
    with pytest.raises(SourceError, match=r"'x' is int64 in .*b\.parquet' and string in .*c\.pa"):
        describe("train", tmp_path)
    assert read(describe("train", tmp_path, columns=["y"])) == {"y": [0, 0, 0]}


def test_numbers_that_fit_no_common_type_are_not_rounded(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=[2**60 + 1])
    write(tmp_path / "b.parquet", x=[0.5])
    source = describe("train", tmp_path)
    with pytest.raises(ReadError, match=r"a\.parquet' \(row group 0\).*'x'.*double"):
        source.pieces[0].read(0, 1)


@pytest.mark.parametrize(
    "empty",
    [
        pa.table({"x": pa.array([], pa.int64()), "y": pa.array([], pa.string())}),
        pa.table({"x": pa.nulls(0), "y": pa.nulls(0)}),
        # As pandas writes a frame to which nothing was ever added.
        pa.table({}),
    ],
)
def test_a_file_without_rows_among_others(tmp_path: Path, empty: pa.Table) -> None:
    pq.write_table(empty, tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", x=[1.5], y=["s"])
    assert read(describe("train", tmp_path)) == {"x": [1.5], "y": ["s"]}


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "arrow"])
def test_a_file_without_rows_needs_no_column_that_is_asked_for(tmp_path: Path, ending: str) -> None:
    empty, other = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    nothing = pa.table({"x": pa.array([], pa.int64())})
    if ending == "parquet":
        pq.write_table(nothing, empty)
        write(other, x=[1], y=["s"])
    elif ending == "arrow":
        feather.write_feather(nothing, str(empty))
        feather.write_feather(pa.table({"x": [1], "y": ["s"]}), str(other))
    else:
        empty.write_text("x\n" if ending == "csv" else "")
        other.write_text("x,y\n1,s\n" if ending == "csv" else '{"x": 1, "y": "s"}\n')
    assert read(describe("train", tmp_path, columns=["y"])) == {"y": ["s"]}
    with pytest.raises(SourceError, match=rf"b\.{ending}' has no column 'yy'.*'y'"):
        describe("train", tmp_path, columns=["yy"])


def test_pandas_index_is_no_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1, 2, 3]})
    frame[frame.x > 1].to_parquet(tmp_path / "a.parquet")
    assert read(describe("train", tmp_path)) == {"x": [2, 3]}


def test_row_groups_without_rows(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("x", pa.int64())])) as writer:
        for values in ([], [1, 2], [], [3]):
            writer.write_table(pa.table({"x": pa.array(values, pa.int64())}))
    source = describe("train", tmp_path)
    assert [piece.rows for piece in source.pieces] == [2, 1]
    assert read(source) == {"x": [1, 2, 3]}


def test_columns_whose_names_look_like_paths(tmp_path: Path) -> None:
    """Arrow takes "a" for all that is below it, and "a.b" for what is in a."""
    write(tmp_path / "a.parquet", **{"a": [{"b": 1, "c": 2}], "a.b": [3]})
    [piece] = describe("train", tmp_path).pieces
    assert piece.read(0, 1, ["a.b"]).to_pydict() == {"a.b": [3]}
    assert piece.read(0, 1, ["a"]).to_pydict() == {"a": [{"b": 1, "c": 2}]}


def test_no_rows_are_read_to_describe_parquet_files(tmp_path: Path) -> None:
    """Nothing but the footer is whole in this file."""
    path = write(tmp_path / "a.parquet", x=list(range(100_000)))
    content = bytearray(path.read_bytes())
    footer = 8 + int.from_bytes(content[-8:-4], "little")
    content[4 : len(content) - footer] = bytes(len(content) - footer - 4)
    path.write_bytes(content)
    source = describe("train", path)
    assert (source.info.num_rows, source.info.columns) == (100_000, ("x",))
    with pytest.raises(ReadError, match=r"a\.parquet' \(row group 0\) can't be read"):
        source.pieces[0].read(0, 1)


@pytest.mark.parametrize("rows", [0, 3, 7])
def test_a_parquet_file_that_has_changed(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "a.parquet", x=[1, 2, 3, 4, 5])
    [piece] = describe("train", path).pieces
    assert piece.read(0, 5).num_rows == 5
    write(path, x=pa.array(range(rows), pa.int64()))
    with pytest.raises(ReadError, match=r"a\.parquet.*has changed since the run began"):
        piece.read(0, 2)


def test_pages_whose_checksum_is_wrong(tmp_path: Path) -> None:
    values = pa.table({"x": pa.array([1.5] * 1000)})
    path = tmp_path / "a.parquet"
    options: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
    pq.write_table(values, path, write_page_checksum=True, **options)
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ReadError, match=r"a\.parquet.*CRC checksum"):
        describe("train", path).pieces[0].read(0, 1000)


def test_a_file_that_has_lost_a_column(tmp_path: Path) -> None:
    """Also where the storage tells neither size nor time."""
    path = write(tmp_path / "a.parquet", x=[1], y=[2])
    [piece] = describe("train", path).pieces
    assert isinstance(piece, RowGroupPiece)
    piece = replace(piece, version=FileVersion())
    write(path, x=[1])
    with pytest.raises(ReadError, match=r"a\.parquet.*no column 'y'.*has changed"):
        piece.read(0, 1)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_file_that_holds_as_many_other_rows(tmp_path: Path, name: str) -> None:
    def written(values: list[int]) -> Path:
        frame = pd.DataFrame({"x": values})
        path = tmp_path / name
        if name.endswith("csv"):
            frame.to_csv(path, index=False)
        else:
            frame.to_parquet(path)
        return path

    [piece] = describe("train", written([1, 2, 3])).pieces
    assert piece.read(0, 3).to_pydict() == {"x": [1, 2, 3]}
    os.utime(written([4, 5, 6]), ns=(0, 10**18))
    with pytest.raises(ReadError, match=rf"{name}'.* has changed since the run began: .*modified"):
        piece.read(0, 3)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", x=[1])
    [piece] = describe("train", path).pieces
    path.unlink()
    with pytest.raises(ReadError, match=r"a\.parquet.*no such file"):
        piece.read(0, 1)


def test_footers_are_parsed_once(tmp_path: Path) -> None:
    """Of a file with many row groups, each is read by itself; only some files are remembered."""
    files = [write(tmp_path / f"{number:02}.parquet", x=[1, 2]) for number in range(20)]
    source = describe("train", tmp_path)
    for piece in source.pieces:
        piece.read(0, 1)
    remembered = [key[1] for key in parquet_files._footers]
    assert remembered == [str(file) for file in files[-8:]]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_file_that_must_not_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch(mode=0)
    with pytest.raises(SourceError, match=rf"{name}' can't be read") as caught:
        describe("train", tmp_path / name)
    assert caught.value.remedy == "Make it readable"
