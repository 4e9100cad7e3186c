"""Category columns: a value is the same category, whichever type it arrives in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from polytrain.boosting.columns import agreed_categories, as_text, codes_of, selected
from polytrain.data.types.schemas import in_one_piece

EAN = 4006381333931


def codes(values: Sequence[Any], kind: pa.DataType, categories: pa.Array) -> list[int | None]:
    column = pa.chunked_array([pa.array(values, kind)])
    found: list[int | None] = codes_of(column, categories).to_pylist()
    return found


@pytest.mark.parametrize("kind", [pa.float64(), pa.int64()])
def test_large_whole_numbers_are_found_among_strings(kind: pa.DataType) -> None:
    categories = pa.array(["5", "10000000000", str(EAN)])
    assert codes([EAN, 10**10, None, 5, 7], kind, categories) == [2, 1, None, 0, None]


def test_large_whole_numbers_of_a_frames_categories_are_found() -> None:
    column = pa.chunked_array([pa.array([1e10, float(EAN)]).dictionary_encode()])
    assert codes_of(column, pa.array([str(EAN), "10000000000"])).to_pylist() == [1, 0]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int64(), pa.uint64()])
def test_whole_numbers_have_the_same_text_in_every_type(kind: pa.DataType) -> None:
    values = pa.array([0, 1, 2**33, 2**53, None]).cast(kind, safe=False)
    assert as_text(values).to_pylist() == [
        "0",
        "1",
        "8589934592",
        "9007199254740992",
        None,
    ]


def test_other_numbers_keep_their_text() -> None:
    values = pa.array([-0.0, 0.5, -1.5, 1e-7, 1e19, float("inf")])
    assert as_text(values).to_pylist() == ["0", "0.5", "-1.5", "1e-7", "1e+19", "inf"]


def test_a_number_that_is_no_whole_number_is_none_of_these() -> None:
    assert codes([1.5, 2.0, 1e30, None], pa.float64(), pa.array([1, 2])) == [None, 1, None, None]


def test_whole_numbers_that_no_float_holds_are_looked_for_among_floats() -> None:
    assert codes([2**53 + 1, 3], pa.int64(), pa.array([0.5, 3.0])) == [None, 1]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_text_is_looked_for_among_numbers(kind: pa.DataType) -> None:
    values = ["10", "7", "10.0", "ten", None]
    assert codes(values, kind, pa.array([7, 10])) == [1, 0, None, None, None]
    assert codes(values, kind, pa.array([7.0, 10.0])) == [1, 0, None, None, None]


def test_lists_of_integers_of_different_sizes_become_one() -> None:
    tables = {"train": pa.table({"x": pa.array([1], pa.int8())}), "valid": pa.table({"x": [1000]})}
    found = agreed_categories(tables, features=["x"], also=["x"], gather=lambda mine: [mine])
    assert found["x"].to_pylist() == [1, 1000]


@pytest.mark.parametrize("is_plain", [False, True])
def test_categories_of_train_keep_their_numbers_beside_other_data_sets(is_plain: bool) -> None:
    train, valid = (pa.array(names).dictionary_encode() for names in (["c", "b"], ["d", "b", "a"]))
    columns = {"train": train, "valid": valid}
    tables = {
        name: pa.table({"x": column.cast(pa.string()) if is_plain else column})
        for name, column in columns.items()
    }
    found = agreed_categories(tables, features=["x"], also=(), gather=lambda mine: [mine])
    assert found["x"].to_pylist() == (["b", "c", "a", "d"] if is_plain else ["c", "b", "a", "d"])


@pytest.mark.parametrize("is_plain", [False, True])
def test_lists_are_the_same_however_the_rows_are_split(is_plain: bool) -> None:
    """As of files that were written one by one, with the categories that each had."""
    parts = [
        pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string())),
        *(pa.array(names).dictionary_encode() for names in (["b", "a"], ["a", "c"], ["d", "b"])),
    ]
    columns = [part.cast(pa.string()) for part in parts] if is_plain else parts
    tables = [pa.table({"x": column}) for column in columns]
    every: list[Any] = []

    def agreed(table: pa.Table, ranks: list[Any]) -> list[str]:
        def gather(mine: Any) -> list[Any]:
            every.append(mine)
            return ranks or [mine]

        found = agreed_categories({"train": table}, features=["x"], also=(), gather=gather)
        return list(found["x"].to_pylist())

    expected = [*"abcd"] if is_plain else [*"bacd"]
    assert agreed(in_one_piece(pa.concat_tables(tables)), []) == expected
    del every[:]
    for table in tables:
        agreed(table, [])
    assert agreed(tables[0], every[:]) == expected


class Name(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_columns_are_looked_up_and_not_searched() -> None:
    names = [Name(f"x{number}") for number in range(400)]
    table = pa.table({str(name): [1.0] for name in names})
    assert selected(table, names[::-1]).column_names == [str(name) for name in names[::-1]]
    assert Name.compared < 10 * len(names)


def test_columns_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="no column 'b', which the model needs"):
        selected(pa.table({"a": [1]}), ["a", "b"])
