"""Values that can't be trained on are counted over all ranks, and told to each of them alike."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.boosting.stumps import Stumps

from polytrain.boosting.columns import floats, plainly_typed
from polytrain.boosting.table_validation import (
    Labels,
    Rule,
    finite,
    is_constant,
    refuse,
    required,
    validated,
    weights,
)
from polytrain.errors import BadDataError

NAN, INF = float("nan"), float("inf")


def column(*values: Any) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values)])


def refusal(rules: list[Rule], *ranks: Any, valid: Any = None) -> str:
    """What every rank is told, each with its values of the column "c"; empty if nothing."""
    tables = [{"train": pa.table({"c": values})} for values in ranks]
    if valid is not None:
        tables[0]["valid"] = pa.table({"c": valid})
    pieces: list[Any] = []

    def noted(piece: Any) -> list[Any]:
        pieces.append(piece)
        return [piece]

    for table in tables:
        with contextlib.suppress(BadDataError):
            refuse(table, rules, gather=noted)
    found = set()
    for table in tables:
        try:
            refuse(table, rules, gather=lambda _: pieces)
        except BadDataError as error:
            found.add(str(error))
        else:
            found.add("")
    [text] = found
    return text


def test_the_rows_of_all_ranks_are_counted() -> None:
    found = refusal(required("label", "c"), [1.0, NAN], [1.0, 2.0], [None, 3.0, NAN])
    assert found == (
        "label: in 3 of 7 rows of 'train' the column 'c' has no value (null or NaN). "
        "Leave such rows out, or give them a value"
    )


def test_a_data_set_that_one_rank_has_is_reported_by_all() -> None:
    found = refusal(required("label", "c"), [1.0], [2.0], valid=[NAN, 1.0])
    assert "in 1 of 2 rows of 'valid'" in found


def test_all_problems_are_reported_at_once() -> None:
    found = refusal(weights("weight", "c"), [-1.0, NAN], [INF, 1e39], valid=[-2.0])
    assert found.startswith("4 problems:\n")
    assert "2 of 4 rows of 'train' the column 'c' is infinite" in found
    assert "is negative (such as -2)" in found


def test_weights_of_0_are_fine_where_others_are_above() -> None:
    assert refusal(weights("weight", "c"), [0.0, 0.0], [1.0]) == ""
    assert "in 3 of 3 rows" in refusal(weights("weight", "c"), [0.0, 0.0], [0.0])


def test_a_rank_without_rows_has_nothing_wrong() -> None:
    empty = pa.array([], pa.float64())
    assert refusal(weights("weight", "c"), empty, [1.0]) == ""


@pytest.mark.parametrize(
    ("labels", "good", "bad", "taken"),
    [
        (Labels(objective="o", low=0, high=1), [0, 0.5, 1], 1.1, "numbers from 0 to 1"),
        (Labels(objective="o", low=0, high=1, whole=True), [0, 1], 0.5, "0 and 1"),
        (Labels(objective="o", low=0, high=3, whole=True), [0, 3], -1, "whole numbers from 0 to 3"),
        (Labels(objective="o", low=0), [0, 1e9], -0.5, "numbers from 0"),
        (Labels(objective="o", low=0, above=True), [0.1, 1e9], 0, "numbers above 0"),
    ],
)
def test_labels_are_what_the_objective_takes(
    labels: Labels, good: list[float], bad: float, taken: str
) -> None:
    assert refusal([labels.rule("label", "c")], np.array(good, float)) == ""
    found = refusal([labels.rule("label", "c")], np.array([*good, bad], float))
    assert f"the objective 'o', which takes {taken} (such as {bad:g})" in found


def test_a_label_that_is_missing_is_reported_as_such_alone() -> None:
    labels = Labels(objective="o", low=0, high=1, whole=True)
    rules = [*required("label", "c"), labels.rule("label", "c")]
    found = refusal(rules, [0.0, NAN])
    assert "no value" in found
    assert "objective" not in found


@pytest.mark.parametrize("bad", [INF, -INF, 1e300])
def test_infinite_features_are_named(bad: float) -> None:
    table = pa.table({"c": [1.0, NAN], "n": [1, 2], "s": ["a", "b"]})
    # Whole numbers may be others in another data set.
    assert [rule.column for rule in finite(table.schema, "XGBoost")] == ["c", "n"]
    rules = finite(table.select(["c"]).schema, "XGBoost")
    assert refusal(rules, [1.0, NAN], [NAN, NAN], pa.nulls(2, pa.float32())) == ""
    found = refusal(rules, [1.0, NAN], [bad, 2.0])
    assert found.startswith("datasets['train']: in 1 of 4 rows of 'train' the column 'c' is inf")


def test_a_constant_is_one_over_all_ranks() -> None:
    ends = [(1.0, 1.0), None, (1.0, 1.0)]
    assert is_constant(column(1, 1), gather=lambda mine: [mine, *ends])
    assert not is_constant(column(2, 2), gather=lambda mine: [mine, *ends])
    assert not is_constant(column(1, 0), gather=lambda mine: [mine])


def checked(table: dict[str, Any], *, is_logging_rank: bool = True) -> pa.Table:
    """A data set "valid" after the checks; "train" is the same with its columns the other way."""
    tables = {"train": pa.table(dict(reversed(table.items()))), "valid": pa.table(table)}
    return validated(
        tables,
        Stumps(label="y", weight="w", begin="s"),
        labels=Labels(objective="o", low=0),
        rules=finite(pa.schema({"x": pa.float64()}), "Stumps"),
        gather=lambda mine: [mine],
        is_logging_rank=is_logging_rank,
    )["valid"]


GOOD = {"x": [1, 2], "w": [1, 1], "s": [0, 0], "y": [0, 3], "d": pa.nulls(2)}


def test_tables_have_the_columns_of_train_in_types_that_frameworks_know() -> None:
    table = checked(GOOD)
    assert table.column_names == ["d", "y", "s", "w", "x"]
    assert table.schema.field("d").type == pa.float64()


@pytest.mark.parametrize(
    ("column", "values", "field"),
    [
        ("x", [INF, 1.0], "datasets['train']"),
        ("w", [-1, 1], "weight"),
        ("s", [NAN, 1], "begin"),
        ("y", [-1, 1], "label"),
        ("y", [None, 1], "label"),
    ],
)
def test_every_column_has_its_rules(column: str, values: list[Any], field: str) -> None:
    with pytest.raises(BadDataError) as raised:
        checked({**GOOD, column: values})
    assert raised.value.problems[0].field == field
    assert f"column '{column}'" in str(raised.value)


def test_one_rank_warns_of_labels_that_are_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        checked(GOOD)
        checked({**GOOD, "y": [3, 3]}, is_logging_rank=False)
        assert caplog.messages == []
        checked({**GOOD, "y": [3, 3]})
    [message] = caplog.messages
    assert "the same label in the column 'y'" in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([True, None]), [1, NAN]),
        (pa.array([1, None], pa.int8()), [1, NAN]),
        (pa.array([2, None], pa.decimal128(4, 2)), [2, NAN]),
        (pa.array([np.float16(2.5), None], pa.float16()), [2.5, NAN]),
        (pa.array([None, None]), [NAN, NAN]),
        (pa.array([7, None, 7]).dictionary_encode(), [7, NAN, 7]),
        (pa.array([2**63], pa.uint64()), [2.0**63]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_every_kind_of_number_becomes_one(values: pa.Array, expected: list[float]) -> None:
    assert np.array_equal(floats(pa.chunked_array([values])), expected, equal_nan=True)


def test_types_that_frameworks_lack_become_ones_that_they_have() -> None:
    table = pa.table(
        {
            "half": pa.array([1.5], pa.float16()),
            "decimal": pa.array([1], pa.decimal128(3, 1)),
            "nothing": pa.nulls(1),
            "number": pa.array([1], pa.int8()),
            "halves": of_one_category(pa.array([1.5], pa.float16())),
            "decimals": of_one_category(pa.array([1], pa.decimal32(3, 1))),
            "label": pa.array([1], pa.decimal128(3, 1)),
        }
    )
    plain = plainly_typed(table, table.column_names[:-1])
    assert list(map(str, plain.schema.types)) == [
        *("float", "double", "double", "int8"),
        *("dictionary<values=float, indices=int8, ordered=0>",),
        *("dictionary<values=double, indices=int8, ordered=0>",),
        "decimal128(3, 1)",
    ]
    assert plain.column("half").to_pylist() == plain.column("halves").to_pylist() == [1.5]


def of_one_category(categories: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), categories)
