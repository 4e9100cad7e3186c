"""A text column that was meant as numbers is warned of, once, with the values that made it text."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

from polytrain.boosting.columns import Counted, counted, warn_of_numbers_as_text, with_numbers


def warnings(caplog: pytest.LogCaptureFixture, *ranks: Any, kind: Any = None) -> list[str]:
    """What is logged where each rank has these values of the column "x"."""
    tables = [pa.table({"x": pa.array(values, kind or pa.string())}) for values in ranks]
    mine: list[Any] = []

    def noted(each: Any) -> list[Any]:
        mine.append(each)
        return [each]

    for table in tables:
        warn_of_numbers_as_text(table, ["x"], gather=noted, is_logging_rank=False)
    assert not caplog.records
    for rank, table in enumerate(tables):
        warn_of_numbers_as_text(table, ["x"], gather=lambda _: mine, is_logging_rank=rank == 0)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_numbers_of_all_ranks_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    [found] = warnings(caplog, ["1", "2.5", "-3e4", "?"], ["7", None, "", ".5"] * 4 + ["-"])
    assert "'x'" in found
    assert "11 of 13 are numbers" in found
    assert "'?', '-'" in found


@pytest.mark.parametrize("values", [["a"] * 9 + ["1"], ["1", "2"], ["", None], [], ["1", "a"]])
def test_other_columns_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, values: list[str | None]
) -> None:
    assert warnings(caplog, values) == []


def test_categories_of_a_frame_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    assert warnings(caplog, ["1"] * 9 + ["?"], kind=kind) == []


def test_missing_values_are_neither_numbers_nor_text() -> None:
    column = pa.chunked_array([["1", " 2 ", "NA"], [None, "", " ", "1e3", "0x1", "1,000"]])
    assert counted(column) == Counted(numbers=3, texts=3, examples=("NA", "0x1", "1,000"))


def test_text_becomes_the_numbers_that_a_model_knows() -> None:
    table = pa.table({"x": ["1", " 2.5", "", None], "kind": ["a", "b", "a", "b"]})
    assert with_numbers(table, ["x"]).to_pydict() == {
        "x": [1, 2.5, None, None],
        "kind": ["a", "b", "a", "b"],
    }
    with pytest.raises(ValueError, match="column 'kind' holds text, such as 'a'"):
        with_numbers(table, ["x", "kind"])


@pytest.mark.parametrize(
    "values", [pa.array(["1", " 2.5", None]), pa.array([1.0, 2.5, None]), pa.array([1, 2, None])]
)
def test_categories_become_the_numbers_that_a_model_knows(values: pa.Array) -> None:
    plain = with_numbers(pa.table({"x": values}), ["x"])
    assert with_numbers(pa.table({"x": values.dictionary_encode()}), ["x"]) == plain


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.list_(pa.int64()), pa.binary()])
def test_types_that_are_no_numbers_are_named(kind: pa.DataType) -> None:
    with pytest.raises(ValueError, match=r"column 'x' is .*, and the model knows numbers there"):
        with_numbers(pa.table({"x": pa.nulls(2, kind)}), ["x"])
