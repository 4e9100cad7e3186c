"""CSV files: their types are those of the whole file, and a wrong line is named."""

from __future__ import annotations

import gzip
import subprocess
import sys
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from polytrain.data.read import csv_files
from polytrain.data.read.csv_files import CsvPiece
from polytrain.data.read.describe import describe
from polytrain.data.read.file_pieces import FileVersion
from polytrain.data_errors import ReadError, SourceError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows are many blocks."""
    monkeypatch.setattr(csv_files, "_BLOCKS", (64, 1 << 12, 1 << 20))


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path: Path, **options: Any) -> dict[str, list[Any]]:
    [piece] = describe("train", path, **options).pieces
    result: dict[str, list[Any]] = piece.read(0, piece.rows).to_pydict()
    return result


MIXED: dict[str, tuple[list[str], list[str], pa.DataType]] = {
    "integers, then floats": (["1", "2"], ["2.5"], pa.float64()),
    "floats, then integers": (["2.5"], ["1", "2"], pa.float64()),
    "integers, then text": (["1", "02"], ["red"], pa.string()),
    "floats, then text": (["1.50"], ["red"], pa.string()),
    "nothing, then integers": (["", "NA"], ["7"], pa.int64()),
    "integers, then nothing": (["7"], ["", "NA"], pa.int64()),
    "nothing, then text": ([""], ["red"], pa.string()),
    "nothing at all": ([""], ["NA"], pa.null()),
    "0 and 1, then truth values": (["1", "0"], ["true"], pa.bool_()),
    "integers, then truth values": (["2", "0"], ["true"], pa.string()),
    "truth values, then floats": (["true"], ["1.5"], pa.string()),
    "days, then times": (["2024-02-29"], ["2024-03-01 12:00:00"], pa.timestamp("s")),
    "times, then fractions": (
        ["2024-03-01 12:00:00"],
        ["2024-03-01 12:00:00.5"],
        pa.timestamp("ns"),
    ),
    "days, then numbers": (["2024-02-29"], ["5"], pa.string()),
    "days of the year 1, then fractions": (
        ["0001-01-01"],
        ["2024-03-01 12:00:00.5"],
        pa.string(),
    ),
    "integers, then very large ones": (["1"], ["100000000000000000000"], pa.float64()),
    "very large integers, then text": (["99999999999999999999"], ["x"], pa.string()),
}


@pytest.mark.parametrize("case", MIXED)
def test_types_are_those_of_the_whole_file(tmp_path: Path, case: str) -> None:
    first, last, expected = MIXED[case]
    column = [*first * 50, *last]
    path = write(tmp_path / "a.csv", "n,x", *(f"{n},{value}" for n, value in enumerate(column)))
    whole = pacsv.read_csv(path)
    source = describe("train", path)
    assert source.schema.field("x").type == expected
    # Arrow, which holds the whole file to find out, comes to the same result.
    assert source.schema.equals(whole.schema)
    assert read(path) == whole.to_pydict()


# Of pandas 2 and 3, which isn't installed everywhere.
MISSING_IN_PANDAS = (
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan"
    "|null"
)


@pytest.mark.parametrize("spelling", ["", *MISSING_IN_PANDAS.split("|")])
@pytest.mark.parametrize("at", [0, 99])
def test_what_is_missing_in_pandas_is_missing(tmp_path: Path, spelling: str, at: int) -> None:
    column = [*map(str, range(99))]
    column.insert(at, spelling)
    path = write(tmp_path / "a.csv", "n,x", *(f"{n},{value}" for n, value in enumerate(column)))
    assert describe("train", path).schema.field("x").type == pa.int64()
    numbers: list[int | None] = [*range(99)]
    numbers.insert(at, None)
    assert read(path)["x"] == numbers


def test_text_is_text_whatever_it_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "n,x", "1,None", "2,NA", "3,red")
    assert read(path)["x"] == ["None", "NA", "red"]


def test_values_between_tabs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "x\ty", "1\ta,b", *['2\t"c\td"'] * 50, "0.5\te")
    assert read(path) == {"x": [1.0, *[2.0] * 50, 0.5], "y": ["a,b", *["c\td"] * 50, "e"]}
    write(path, "x\ty", *["1\ta"] * 50, "1\t2\t3")
    with pytest.raises(SourceError, match=r"a\.tsv', line 52: 3 field.*with a tab"):
        describe("train", path)


def test_compressed_values_between_tabs(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"x\ty\n1\ta,b\n"))
    assert read(tmp_path) == {"x": [1], "y": ["a,b"]}


ROUNDED = {
    "a fraction besides": (["9007199254740993", "0.5"], []),
    "a fraction far below": (["-9007199254740993"], ["0.5"]),
    "a fraction far above": (["0.5"], ["9007199254740993"]),
    "more than 64 bits": (["18446744073709551615"], []),
    "more than 64 bits far below": (["1"], ["99999999999999999999"]),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_no_whole_number_is_rounded(tmp_path: Path, case: str) -> None:
    first, last = ROUNDED[case]
    column = [*first * 50, *last]
    path = write(tmp_path / "a.csv", "n,x", *(f"{n},{value}" for n, value in enumerate(column)))
    largest = max(first + last, key=len).lstrip("-")
    with pytest.raises(SourceError, match=rf"a\.csv': the column 'x' .* round .*{largest}"):
        describe("train", path)
    assert describe("train", path, columns=["n"]).info.num_rows == len(column)


@pytest.mark.parametrize(
    "numbers", [["9007199254740992", "0.5"], ["1e300", "0.1"], ["-inf", "inf"]]
)
def test_numbers_that_floats_hold_are_read(tmp_path: Path, numbers: list[str]) -> None:
    path = write(tmp_path / "a.csv", "x", *numbers)
    assert list(map(repr, read(path)["x"])) == [repr(float(number)) for number in numbers]


def test_no_whole_number_is_rounded_for_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x", "9007199254740993")
    assert read(tmp_path) == {"x": [2**53 + 1]}
    write(tmp_path / "b.csv", "x", "0.5")
    with pytest.raises(SourceError, match=r"a\.csv': the column 'x' .*9007199254740993"):
        describe("train", tmp_path)


def test_several_columns_change_their_types(tmp_path: Path) -> None:
    rows = [f"{n},{n},{n},{n}" for n in range(100)]
    path = write(tmp_path / "a.csv", "a,b,c,d", *rows, '1.5,red,100,""', "2,,101,true")
    types = {field.name: field.type for field in describe("train", path).schema}
    assert types == {"a": pa.float64(), "b": pa.string(), "c": pa.int64(), "d": pa.string()}


def test_types_of_several_files(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x,t", *["1,2024-02-29"] * 50)
    write(tmp_path / "b.csv", "x,t", *["2,2024-02-28"] * 50, "0.5,2024-02-28")
    source = describe("train", tmp_path)
    assert [piece.read(0, 1).to_pydict() for piece in source.pieces] == [
        {"x": [1.0], "t": [date(2024, 2, 29)]},
        {"x": [2.0], "t": [date(2024, 2, 28)]},
    ]


def test_text_is_text_in_files_that_hold_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "n,x", "1,DE", "2,NA", "3,")
    write(tmp_path / "b.csv", "n,x", "4,NA", "5,", "6,None")
    pieces = describe("train", tmp_path).pieces
    found = [piece.read(0, 3, ["x"]).to_pydict()["x"] for piece in pieces]
    assert found == [["DE", "NA", ""], ["NA", "", "None"]]
    assert read(tmp_path / "b.csv")["x"] == [None] * 3


def test_quotes_newlines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", '\ufeffx,"y, z"', '"one\ntwo",1', "", '"say ""three""",2')
    assert read(path) == {"x": ["one\ntwo", 'say "three"'], "y, z": [1, 2]}


def test_times_with_zones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "t", "2024-03-01T12:00:00Z")
    assert str(read(path)["t"][0]).startswith(str(datetime(2024, 3, 1, 12)))


def test_a_row_longer_than_a_block(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,y", "1," + "z" * 3000, "2,short")
    [piece] = describe("train", path).pieces
    assert piece.read(1, 2).to_pydict() == {"x": [2], "y": ["short"]}
    assert len(piece.read(0, 1).column("y")[0].as_py()) == 3000


def test_a_name_that_occurs_twice(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.csv' has more than one column 'x'"):
        describe("train", write(tmp_path / "a.csv", "x,x", "1,2"))


def test_columns_that_nobody_wants_may_be_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,name\n1,Gen\xe8ve\n2,Oslo\n")
    assert read(path, columns=["x"]) == {"x": [1, 2]}


@pytest.mark.parametrize(("at", "line"), [("header", 1), ("first", 2), ("last", 204)])
def test_bytes_that_are_no_text(tmp_path: Path, at: str, line: int) -> None:
    header, *rows = ["x,naïve" if at == "header" else "x,y", *["1,a"] * 100, '"2\n2",b']
    rows += ["1,é" if at == "last" else "1,e"] if at != "first" else []
    rows = ["1,é", *rows] if at == "first" else [*rows[:1], *rows[1:-1], *["3,c"] * 100, rows[-1]]
    path = tmp_path / "a.csv"
    path.write_bytes("".join(f"{row}\n" for row in [header, *rows]).encode("latin1"))
    with pytest.raises(SourceError, match=rf"a\.csv' is not UTF-8: line {line} ") as caught:
        describe("train", path)
    assert "iconv" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "lines", "found"),
    [
        ("a.csv", ["x;y", "1;2", "3;4"], ";"),
        ("a.csv", ["x;y", "1,5;2", "3;4"], ";"),
        ("a.csv", ["x\ty", "1\t2"], "\\t"),
        ("a.tsv", ["x,y", "1,2"], ","),
    ],
)
def test_fields_between_other_characters(
    tmp_path: Path, name: str, lines: list[str], found: str
) -> None:
    with pytest.raises(SourceError) as error:
        read(write(tmp_path / name, *lines))
    assert f"has '{found}' between its 2 columns" in error.value.what
    assert f"pandas.read_csv(…, sep='{found}')" in error.value.remedy


@pytest.mark.parametrize(("header", "name"), [('"x;y"', "x;y"), ("x;y", "x;y"), ("x", "x")])
def test_a_column_of_text_with_semicolons(tmp_path: Path, header: str, name: str) -> None:
    assert read(write(tmp_path / "a.csv", header, "no", "a;b")) == {name: ["no", "a;b"]}


@pytest.mark.parametrize(("row", "count"), [("1", 1), ("1,2,3", 3)])
def test_a_line_with_other_fields(tmp_path: Path, row: str, count: int) -> None:
    # A line is a line of the file, not a row.
    path = write(tmp_path / "a.csv", "x,y", '"1\n1",2', "", *["3,4"] * 100, row, "5,6")
    with pytest.raises(SourceError, match=rf"line 105: {count} fields? .* header has 2"):
        describe("train", path)


def versionless(path: Path) -> CsvPiece:
    """As on a storage that tells neither sizes nor times."""
    [piece] = describe("train", path).pieces
    assert isinstance(piece, CsvPiece)
    return replace(piece, version=FileVersion())


@pytest.mark.parametrize("rows", [3, 9])
def test_a_csv_file_that_has_changed(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "a.csv", "x", *map(str, range(5)))
    [piece] = describe("train", path).pieces
    without_version = versionless(path)
    write(path, "x", *map(str, range(rows)))
    with pytest.raises(ReadError, match=r"a\.csv' has changed .*size was 12 bytes"):
        piece.read(2, 5)
    with pytest.raises(ReadError, match=r"a\.csv' has (fewer|more) than 5 rows.*changed"):
        without_version.read(2, 5)


def test_rows_appended_where_a_block_ends(tmp_path: Path) -> None:
    lines = ["x", *["10"] * 20]
    piece = versionless(write(tmp_path / "a.csv", *lines))
    write(tmp_path / "a.csv", *lines, "100")
    with pytest.raises(ReadError, match=r"a\.csv' has more than 20 rows.*changed"):
        piece.read(0, 20)


def test_a_csv_file_with_other_values_now(tmp_path: Path) -> None:
    piece = versionless(write(tmp_path / "a.csv", "x", "1"))
    write(tmp_path / "a.csv", "x", "red")
    with pytest.raises(ReadError, match=r"a\.csv' can't be read: .*red"):
        piece.read(0, 1)


DESCRIBE = """
import resource, sys
import pyarrow as pa
from polytrain.data.read.csv_files import CsvPiece
from polytrain.data.read.describe import describe
from polytrain.data.read.file_pieces import FileVersion
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = describe("train", sys.argv[1])
assert [str(field.type) for field in source.schema] == ["string", "double"], source.schema
[piece] = source.pieces
assert piece.read(5, 7).to_pydict() == {"x": ["5", "6"], "y": [0.0, 0.0]}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """Types change at its very end; far less of it than all is in memory at any time."""
    filler = "0" * 1000
    path = tmp_path / "a.csv"
    with path.open("w") as file:
        file.write("x,y\n")
        for n in range(400_000):
            file.write(f"{n},{filler}\n")
        file.write("red,1.5\n")
    size = path.stat().st_size // 2**20
    grown = subprocess.check_output([sys.executable, "-c", DESCRIBE, path], text=True)
    assert int(grown) < size // 2, f"{grown} MiB for {size} MiB"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["1", "", "3", ""], [1, None, 3, None]),
        (["", "a"], ["", "a"]),
        (["1"] * 40 + ["", "2.5"], [1.0] * 40 + [None, 2.5]),
    ],
)
def test_an_empty_line_is_a_row_where_there_is_one_column(
    lines: list[str], expected: list[Any], tmp_path: Path
) -> None:
    assert read(write(tmp_path / "a.csv", "x", *lines)) == {"x": expected}


def test_a_table_of_one_column_comes_back_from_csv(tmp_path: Path) -> None:
    table = pa.table({"x": [1, None, None, 4, None]})
    pacsv.write_csv(table, tmp_path / "a.csv")
    assert read(tmp_path / "a.csv") == table.to_pydict()


def test_an_empty_line_is_nothing_between_several_columns(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", "x,y", "1,2", "", "3,4", "")) == {
        "x": [1, 3],
        "y": [2, 4],
    }
