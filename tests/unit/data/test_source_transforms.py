"""A function between the rows as they lie and the rows as they are trained on."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.shards import shard_of

from polytrain.data.read.describe import Source, describe
from polytrain.data.types.columns import column_to_numpy
from polytrain.data_errors import SourceError, TransformError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Rows 0 … 19 in two files, in row groups of ten, four, and six rows."""
    pq.write_table(pa.table({"x": range(10)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": range(10, 20)}), tmp_path / "b.parquet", row_group_size=4)
    return tmp_path


def rows(source: Source) -> pa.Table:
    return pa.concat_tables([piece.read(0, piece.rows) for piece in source.pieces])


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": batch["x"] * 2, "pair": np.stack([batch["x"], -batch["x"]], axis=1)}


def test_rows_go_through_the_function(files: Path) -> None:
    source = describe("train", files, transform=doubled)
    assert source.info.columns == ("twice", "pair")
    assert source.info.num_rows == 20
    found = rows(source)
    assert found.schema.equals(source.schema)
    assert found.column("twice").to_pylist() == list(range(0, 40, 2))
    assert column_to_numpy(found.column("pair"))[13].tolist() == [13, -13]


def test_it_travels_with_the_pieces(files: Path) -> None:
    pieces = pickle.loads(pickle.dumps(describe("train", files, transform=doubled).pieces))
    assert pieces[1].read(1, 3, ["twice"]).to_pydict() == {"twice": [22, 24]}


def test_it_gets_the_rows_asked_for_and_no_others(files: Path) -> None:
    def noting(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["x"].tolist())
        return batch

    seen: list[list[int]] = []
    source = describe("train", files, transform=noting)
    assert seen == [list(range(8))]
    seen.clear()
    source.pieces[1].read(1, 3)
    assert source.pieces[1].read(2, 2).num_rows == 0
    assert seen == [[11, 12]]


def test_it_gets_the_columns_that_are_wanted() -> None:
    def noting(batch: dict[str, Any]) -> dict[str, Any]:
        assert list(batch) == ["y", "x"]
        return {"sum": batch["x"] + batch["y"]}

    data = {"x": [1, 2], "y": [3, 4], "z": [5, 6]}
    source = describe("train", data, columns=["y", "x"], transform=noting)
    assert rows(source).to_pydict() == {"sum": [4, 6]}


def test_it_may_change_its_arrays_in_place() -> None:
    def halve(batch: dict[str, Any]) -> dict[str, Any]:
        batch["x"] /= 2
        return batch

    data = {"x": np.array([1.0, 2.0])}
    source = describe("train", data, transform=halve)
    assert [rows(source).to_pydict() for _ in range(2)] == [{"x": [0.5, 1.0]}] * 2
    assert data["x"].tolist() == [1.0, 2.0]


def test_tensors_come_and_go_as_arrays() -> None:
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)

    def scaled(batch: dict[str, Any]) -> dict[str, Any]:
        return {"image": batch["image"].astype(np.float32) / 255, "name": ["a"] * len(batch["n"])}

    source = describe("train", {"image": images, "n": range(4)}, transform=scaled)
    [piece] = source.pieces
    np.testing.assert_allclose(
        column_to_numpy(piece.read(1, 3).column("image")), images[1:3] / 255, rtol=1e-6
    )
    assert piece.read(1, 3).column("name").to_pylist() == ["a", "a"]


def fails_from(limit: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["x"].max() >= limit:
            raise ValueError("no such word: 'zwölf'")
        return batch

    return transform


def test_an_error_says_on_which_rows_of_which_file(files: Path) -> None:
    source = describe("train", files, transform=fails_from(12))
    source.pieces[1].read(0, 2)
    with pytest.raises(TransformError) as caught:
        source.pieces[1].read(1, 4)
    message = str(caught.value)
    assert "rows 11 to 13 of 'train'" in message
    assert "b.parquet' (row group 0)" in message
    assert "ValueError: no such word: 'zwölf'" in message
    assert isinstance(caught.value.__cause__, ValueError)
    there = pickle.loads(pickle.dumps(caught.value))
    assert str(there) == message
    assert isinstance(there.__cause__, ValueError)


def test_a_transform_that_exits_ends_no_training_function(files: Path) -> None:
    def exits(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["x"].max() >= 12:
            sys.exit(0)
        return batch

    source = describe("train", files, transform=exits)
    with pytest.raises(TransformError, match=r"SystemExit: 0 \(.*rows 11 to 13 of 'train'"):
        source.pieces[1].read(1, 4)


class StubbornError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("can't be pickled")


def test_an_error_whose_cause_stays_behind() -> None:
    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if len(batch["x"]) == 1:
            raise StubbornError("says it anyway")
        return batch

    [piece] = describe("train", {"x": [1, 2]}, transform=transform).pieces
    with pytest.raises(TransformError) as caught:
        piece.read(0, 1)
    there = pickle.loads(pickle.dumps(caught.value))
    assert "says it anyway" in str(there)


def test_an_error_on_the_first_rows_is_one_of_the_source(files: Path) -> None:
    with pytest.raises(SourceError, match=r"zwölf.*rows 0 to 7 of 'train'.*a\.parquet") as caught:
        describe("train", files, transform=fails_from(0))
    assert isinstance(caught.value.__cause__, TransformError)
    assert caught.value.remedy


def changing(result: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Harmless on eight rows, something else on fewer."""
    return lambda batch: batch if len(batch["x"]) == 8 else result(batch["x"])


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda x: None, "None for rows .* not a dict"),
    "an array": (lambda x: x, "ndarray .* not a dict"),
    "a scalar": (lambda x: {"x": 5}, "no table: 'x'"),
    "fewer rows": (
        lambda x: {"x": x[1:]},
        r"returned 2 rows for .*, which are 3\. .* leave rows out .*filter",
    ),
    "arrays of several lengths": (lambda x: {"x": x, "y": x[1:]}, "x: 3, y: 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_table_is_refused(case: str) -> None:
    result, message = WRONG[case]
    with pytest.raises(SourceError, match=message):
        describe("train", {"x": [1, 2, 3]}, transform=lambda batch: result(batch["x"]))


LATER = {
    **WRONG,
    "another column": (lambda x: {"y": x}, r"\['y'\] for .*\['x'\] for the first rows"),
    "one more column": (lambda x: {"x": x, "y": x}, r"\['x', 'y'\] for .* for the first rows"),
    "another type": (lambda x: {"x": ["red"] * len(x)}, "string as 'x' .* int64 for the first"),
    "numbers that would be rounded": (lambda x: {"x": x + 0.5}, "double as 'x' .* int64"),
    "tensors": (lambda x: {"x": np.ones((len(x), 2))}, "tensor.* as 'x' .* int64"),
    "no columns": (lambda x: {}, r"columns \[\]"),
}


@pytest.mark.parametrize("case", LATER)
def test_what_differs_later_says_on_which_rows(case: str) -> None:
    result, message = LATER[case]
    source = describe("train", {"x": range(20)}, transform=changing(result))
    with pytest.raises(TransformError, match=message) as caught:
        source.pieces[0].read(10, 13)
    assert "rows 10 to 12 of 'train'" in str(caught.value)


BOXES = [np.ones((rows % 3, 4)) for rows in range(20)]


@pytest.mark.parametrize("of_one_shape", [BOXES[:1], BOXES[2:3], [BOXES[1]] * 2])
def test_lists_that_have_one_shape_by_chance(of_one_shape: list[Any]) -> None:
    """Such as those of a batch of one row, be they empty."""
    source = describe(
        "train",
        {"x": range(20)},
        transform=lambda batch: {"x": BOXES[:8] if len(batch["x"]) == 8 else of_one_shape},
    )
    column = source.pieces[0].read(10, 10 + len(of_one_shape)).column("x")
    assert column.type == source.schema.field("x").type
    assert column.to_pylist() == [each.tolist() for each in of_one_shape]


def test_no_columns_at_all() -> None:
    with pytest.raises(SourceError, match="no columns"):
        describe("train", {"x": [1]}, transform=lambda batch: {})


def test_no_function_at_all() -> None:
    with pytest.raises(SourceError, match="transform is a str"):
        describe("train", {"x": [1]}, transform="scale")  # type: ignore[arg-type]


def test_nothing_to_try_it_on(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no rows"):
        describe("train", {"x": []}, transform=doubled)


class Squares:
    """A map-style data set."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index * index}


def test_shuffled_items_go_through_the_function_together() -> None:
    """Single rows would leave nothing of what it computes over some."""
    sizes = []

    def noted(batch: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(batch["x"]))
        return {"x": batch["x"] + 1}

    shard = shard_of(Squares(), shuffle=True, transform=noted)
    sizes.clear()
    batches = [batch["x"] for batch in shard.iter_batches(batch_size=5)]
    assert sizes == [5, 5, 5, 5]
    assert sorted(np.concatenate(batches)) == [n * n + 1 for n in range(20)]
    assert np.concatenate(batches).tolist() != sorted(np.concatenate(batches))


def test_the_rows_of_a_failure_are_named_in_any_order() -> None:
    def failing(batch: dict[str, Any]) -> dict[str, Any]:
        if 361 in batch["x"]:
            raise ZeroDivisionError("of 361")
        return batch

    shard = shard_of(Squares(), shuffle=True, transform=failing)
    with pytest.raises(
        TransformError, match=r"failed on rows (\d+, ){4}\d+ and 15 more of 'train'"
    ):
        list(shard.iter_batches(batch_size=20))


@pytest.mark.parametrize(
    ("first", "late", "kind"),
    [
        (None, "late", pa.string()),
        (None, "late", pa.dictionary(pa.int8(), pa.string())),
        ([], ["late"], pa.list_(pa.string())),
        ([], [[0.1]], pa.list_(pa.list_(pa.float32()))),
        ({"a": None}, {"a": "late"}, pa.struct({"a": pa.string()})),
        ([], [("late", 1), ("b", None)], pa.map_(pa.string(), pa.int8())),
        ([], [(1, [float("nan"), 2.0])], pa.map_(pa.int8(), pa.list_(pa.float64()))),
    ],
)
def test_a_column_that_begins_without_values_keeps_its_type(
    first: Any, late: Any, kind: pa.DataType
) -> None:
    column = pa.array([first] * 20 + [late] + [first] * 20, kind)
    batches = shard_of(pa.table({"x": column}), transform=dict).iter_batches(
        batch_size=7, format="arrow"
    )
    rows = [row for each in batches for row in each["x"].to_pylist()]
    np.testing.assert_equal(rows, column.to_pylist())


def test_a_map_that_a_function_changes_is_not_rounded() -> None:
    def halves(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [[(key, value / 2) for key, value in row] for row in batch["x"]]}

    column = pa.array([[("a", 2)], [("a", 3)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(SourceError, match="'x' can't become a column"):
        describe("train", pa.table({"x": column}), transform=halves)
