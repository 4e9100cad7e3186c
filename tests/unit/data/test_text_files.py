"""Rows of a file that is read from its start."""

from __future__ import annotations

import pyarrow as pa
import pytest

from polytrain.data.read.text_files import cut
from polytrain.data_errors import ReadError


def parts() -> list[pa.Table]:
    return [pa.table({"x": numbers}) for numbers in ([0, 1], [2, 3], [4, 5])]


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("stop", range(7))
def test_the_rows_between_two_numbers(start: int, stop: int) -> None:
    found = pa.concat_tables([parts()[0][:0], *cut(parts(), start, stop, rows=6, where="f")])
    assert found.column("x").to_pylist() == [*range(start, stop)]


@pytest.mark.parametrize(("rows", "which"), [(4, "more"), (8, "fewer")])
def test_a_file_with_other_rows_than_before_is_an_error(rows: int, which: str) -> None:
    with pytest.raises(ReadError, match=rf"f has {which} than {rows} rows"):
        list(cut(parts(), 0, rows, rows=rows, where="f"))
