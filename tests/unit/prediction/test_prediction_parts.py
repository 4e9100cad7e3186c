"""How rows are divided into parts, grouped into units, and cut out of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.data.read.pieces import Piece
from polytrain.prediction.parts import PART_ROWS, cut, default_part_rows, divided, units
from polytrain.prediction.predictor import as_table, streams


@dataclass(frozen=True)
class Rows(Piece):
    """Rows of a file that may have to be read from its start."""

    rows: int
    is_seekable: bool

    @property
    def where(self) -> str:
        return "here"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        raise NotImplementedError

    def seekable(self, *, scattered: bool) -> bool:
        return self.is_seekable


def test_a_part_of_a_table_is_sent_without_the_rest_of_it() -> None:
    kinds = ["one", "other"] * 100_000
    table = pa.table(
        {"x": range(200_000), "text": kinds, "kind": pa.array(kinds).dictionary_encode()}
    )
    part = table.slice(70_000, 100_000)
    sent = [*streams(part)]
    assert len(sent) == 2
    assert sum(map(len, sent)) < 1.01 * part.nbytes
    assert pa.concat_tables(pa.ipc.open_stream(each).read_all() for each in sent).equals(part)


@given(rows=st.integers(1, 5000), part_rows=st.integers(1, 700))
def test_parts_are_all_rows_once_and_named_in_their_order(rows: int, part_rows: int) -> None:
    parts = divided(rows, part_rows)
    assert [row for part in parts for row in part.rows] == list(range(rows))
    assert max(len(part.rows) for part in parts) <= part_rows
    names = [part.file for part in parts]
    assert names == sorted(set(names))


def test_names_keep_their_order_beyond_five_digits() -> None:
    names = [part.file for part in divided(100_001, 1)]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, PART_ROWS), (50_000_000, PART_ROWS), (500_000_000, 500_000), (10**10, 1_000_000)],
)
def test_parts_of_large_data_are_larger(rows: int, expected: int) -> None:
    assert default_part_rows(rows) == expected


def test_a_file_that_is_read_from_its_start_is_one_unit() -> None:
    pieces = [Rows(25, True), Rows(30, False), Rows(20, True)]
    parts = divided(75, 10)
    numbers = [[part.number for part in unit] for unit in units(parts, pieces)]
    # Parts 3 to 5 begin in the second piece, which is read in one pass.
    assert numbers == [[0], [1], [2], [3, 4, 5], [6], [7]]
    rest = units(parts, pieces, finished={0, 4})
    assert [[part.number for part in unit] for unit in rest] == [[1], [2], [3, 5], [6], [7]]


@given(
    rows=st.integers(1, 300),
    part_rows=st.integers(1, 60),
    table_rows=st.integers(1, 80),
    finished=st.sets(st.integers(0, 300)),
)
def test_a_pass_is_cut_into_the_rows_of_its_parts(
    rows: int, part_rows: int, table_rows: int, finished: set[int]
) -> None:
    pieces = [Rows(rows, False)]
    for unit in units(divided(rows, part_rows), pieces, finished=finished):
        start, stop = unit[0].rows.start, unit[-1].rows.stop
        whole = pa.table({"row": range(start, stop)})
        tables = [whole.slice(at, table_rows) for at in range(0, len(whole), table_rows)]
        found: dict[int, list[int]] = {}
        for part, table in cut(tables, unit):
            found.setdefault(part.number, []).extend(table["row"].to_pylist())
        assert found == {part.number: list(part.rows) for part in unit}


def test_one_row_of_several_dimensions_is_a_column_of_tensors() -> None:
    row = np.arange(6.0).reshape(3, 2)
    found = as_table(row[np.newaxis], pa.table({"k": [7]}), prediction_column="p")
    assert found.column("p").combine_chunks().to_numpy_ndarray().tolist() == [row.tolist()]


def test_predictions_that_arrow_has_no_type_for_are_floats() -> None:
    kinds = pytest.importorskip("ml_dtypes", reason="it comes with TensorFlow")
    found = as_table(np.ones((1, 2), kinds.bfloat16), pa.table({"k": [7]}), prediction_column="p")
    assert found.column("p").type == pa.list_(pa.float32(), 2)
