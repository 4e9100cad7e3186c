"""JSON Lines files, and rows as dicts: exact types, from all rows."""

from __future__ import annotations

import gzip
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.shards import shard_of

from polytrain.data.read import json_files, tables
from polytrain.data.read.describe import Source, describe
from polytrain.data_errors import ReadError, SourceError

TENSOR = pa.fixed_shape_tensor(pa.int64(), (2,))


def written(path: Path, *rows: Any) -> Path:
    """Each row as an object in a line of its own; text as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))
    return path


def read(source: Source) -> pa.Table:
    return pa.concat_tables([piece.read(0, piece.rows) for piece in source.pieces])


@pytest.fixture(params=["one block", "a block for each line"])
def lines(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> Path:
    """A file's place, whatever is parsed at once."""
    if request.param != "one block":
        monkeypatch.setattr(json_files, "_BLOCK", 1)
    return tmp_path / "a.jsonl"


def test_columns_that_are_not_read_may_have_values_of_any_type(lines: Path) -> None:
    written(lines, {"x": 1, "any": "a"}, {"any": {"b": 1}}, {"x": 2.5, "any": [None]})
    source = describe("train", lines, columns=["x"])
    assert read(source).to_pydict() == {"x": [1.0, None, 2.5]}
    with pytest.raises(SourceError, match="the column 'any' is string in some rows"):
        describe("train", lines)
    with pytest.raises(SourceError, match=r"no column 'y'\. .*x, any"):
        describe("train", lines, columns=["y"])
    written(lines, {"x": 1, "any": "a"}, {"x": 2, "any": 1}, [3])
    with pytest.raises(SourceError, match=r"a\.jsonl', line 3: it isn't an object"):
        describe("train", lines, columns=["x"])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.5], pa.float64()),
        ([None, 2], pa.int64()),
        (["2024-01-01", "b"], pa.string()),
        (["2024-01-01", "2024-01-02T00:00:00Z"], pa.string()),
        ([[1], [], [0.5, 2]], pa.list_(pa.float64())),
        ([[["2024-01-01"]], None], pa.list_(pa.list_(pa.string()))),
        ([{"a": 1}, {"b": "2024-01-01"}], pa.struct({"a": pa.int64(), "b": pa.string()})),
        ([2**53 + 1, -(2**63)], pa.int64()),
        (
            [{"id": 2**53 + 1, "share": 0.5}, {"id": 2**53 + 3, "share": 1}],
            pa.struct({"id": pa.int64(), "share": pa.float64()}),
        ),
        ([True, None], pa.bool_()),
    ],
)
def test_values_have_the_type_that_all_of_them_fit(
    lines: Path, values: list[Any], kind: pa.DataType
) -> None:
    source = describe("train", written(lines, *({"x": value} for value in values)))
    assert source.schema.field("x").type == kind
    assert len(source.pieces) == 1
    table = read(source)
    assert table.schema.types == [kind]
    if not pa.types.is_struct(kind):
        assert table["x"].to_pylist() == values


def test_a_key_that_a_line_lacks_is_a_missing_value(lines: Path) -> None:
    source = describe("train", written(lines, {"x": 1, "y": "a"}, "", {"x": 2}, {"z": True}))
    assert read(source).to_pydict() == {
        "x": [1, 2, None],
        "y": ["a", None, None],
        "z": [None, None, True],
    }
    [batch] = shard_of(lines).iter_batches()
    assert batch["x"].dtype == np.float64
    assert batch["z"].tolist() == [None, None, True]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1}, '{"x": '], r"a\.jsonl', line 2: "),
        ([{"x": 1}, {"x": 2}, "[3]"], r"a\.jsonl', line 3: it isn't an object"),
        (['[{"x": 1},', '{"x": 2}]'], r"a\.jsonl', line 1"),
        ([{"x": "a"}, {"x": 1}], "column 'x' is string in some rows of .*a.jsonl' and "),
        ([{"x": True}, {"x": 1}], "column 'x' is bool(ean)? in some rows of "),
        ([{"x": 2**53 + 1}, {"x": 0.5}], "'x' is read as float64, which would round 90071992547"),
        ([{"x": [2**53 + 1]}, {"x": [0.5]}], "'x' is read as float64, which would round"),
        ([{"x": {"y": 2**53 + 1}}, {"x": {"y": 0.5}}], "'x' is read as float64, which would round"),
        ([{"x": 2**64 + 1}], "'x' is read as float64, which would round 18446744073709551617"),
    ],
)
def test_what_is_wrong_with_a_file_is_reported(lines: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", written(lines, *rows))
    assert caught.value.remedy


def test_bytes_that_are_no_text_are_reported_with_their_line(lines: Path) -> None:
    lines.write_bytes('{"x": "a"}\n{"x": "é"}'.encode("latin1"))
    with pytest.raises(SourceError, match="not UTF-8: line 2"):
        describe("train", lines)


def test_whole_numbers_are_not_rounded_for_another_file(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", {"x": 2**53 + 1})
    written(tmp_path / "b.jsonl", {"x": 0.5})
    with pytest.raises(SourceError, match=r"a\.jsonl.*'x' is read as float64.*9007199254740993"):
        describe("train", tmp_path)


def test_rows_from_anywhere_and_columns_alone(lines: Path) -> None:
    rows = [{"x": n, "y": f"{n}"} for n in range(9)]
    [piece] = describe("train", written(lines, *rows)).pieces
    assert piece.read(2, 5, ["y"]).to_pydict() == {"y": ["2", "3", "4"]}
    assert describe("train", lines, columns=["y"]).schema.names == ["y"]
    with pytest.raises(SourceError, match="no column 'z'"):
        describe("train", lines, columns=["z"])


def test_a_file_that_changes_is_noticed(lines: Path) -> None:
    [piece] = describe("train", written(lines, {"x": 1}, {"x": 2})).pieces
    written(lines, {"x": 1})
    with pytest.raises(ReadError, match="changed"):
        piece.read(0, 2)


def test_compressed_lines_and_partitions(tmp_path: Path) -> None:
    for year in (2023, 2024):
        place = tmp_path / f"year={year}" / "a.ndjson.gz"
        os.mkdir(place.parent)
        place.write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}\n'))
    table = read(describe("train", tmp_path))
    assert table.to_pydict() == {"x": [1, 2, 1, 2], "year": [2023, 2023, 2024, 2024]}


# Dicts


def some(*rows: Any) -> Iterator[Any]:
    yield from rows


@pytest.mark.parametrize("as_iterator", [False, True])
def test_dicts_are_rows(as_iterator: bool) -> None:
    rows = [{"x": 1, "y": "a"}, {"x": 2, "z": [1, 2]}, {"z": [3]}]
    table = read(describe("train", some(*rows) if as_iterator else rows))
    assert table.to_pydict() == {
        "x": [1, 2, None],
        "y": ["a", None, None],
        "z": [None, [1, 2], [3]],
    }


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.5], pa.float64()),
        ([np.float32(1), np.float32(2)], pa.float32()),
        ([np.array(1), np.array(2)], pa.int64()),
        ([[1, 2], [3, 4]], TENSOR),
        ([None, [1, 2], [3]], pa.large_list(pa.int64())),
        ([None, 1, 2.5], pa.float64()),
        ([1, np.ma.masked], pa.int64()),
    ],
)
@pytest.mark.parametrize("at_once", [1, 100])
def test_types_are_found_from_all_dicts(
    values: list[Any], kind: pa.DataType, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_AT_ONCE", at_once)
    found = read(describe("train", [{"x": value} for value in values]))
    assert found.schema.types == [kind]


class Rows:
    def __iter__(self) -> Iterator[Any]:
        return some({"x": 1}, {"x": 2})


@pytest.mark.parametrize("rows", [Rows(), deque(Rows()), {1: {"x": 1}, 2: {"x": 2}}.values()])
def test_whatever_gives_dicts_is_read(rows: Any) -> None:
    assert read(describe("train", rows)).to_pydict() == {"x": [1, 2]}


@pytest.mark.parametrize("masked", [np.ma.masked, np.ma.array(5, mask=True)])
def test_masked_numbers_are_missing(masked: Any) -> None:
    found = read(describe("train", [{"x": 1}, {"x": masked}]))
    assert found.to_pydict() == {"x": [1, None]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1}, 5], "item 1 is an int, not a dict"),
        ([{"x": 1}, {"x": "a"}], "'x'"),
        ([{"x": True}, {"x": 1}], "'x'"),
        ([{"x": 2**53 + 1}, {"x": 0.5}], "'x'.*9007199254740993"),
        ([{"x": np.ma.array([1, 2], mask=[0, 1])}, {"x": [1, 2]}], "'x'.*masked"),
        ([{}, {}], "no rows"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 100])
def test_dicts_that_are_no_rows(
    rows: list[Any], message: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_AT_ONCE", at_once)
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", some(*rows))
    assert caught.value.remedy


def test_an_iterator_without_rows() -> None:
    with pytest.raises(SourceError, match="no rows"):
        describe("train", some())
    with pytest.raises(SourceError, match="item 0 is an int"):
        describe("train", some(1))
