"""What an output says of its predictions, and which other requests it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from polytrain.prediction.record import (
    PredictionRecord,
    record_from_json,
    record_problems,
    split_options,
)

RECORD = PredictionRecord(
    model="model",
    data="data",
    rows=10,
    rows_per_file=5,
    keep=("id",),
    prediction_column="prediction",
    options={"output_margin": True},
    code={"collate_fn": "1234"},
    python="3.11",
)


def test_a_record_is_read_as_it_was_written() -> None:
    assert record_from_json(RECORD.to_json()) == RECORD
    assert not [*record_problems(RECORD, RECORD, place="there")]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1}'])
def test_what_is_no_record_is_none(content: bytes) -> None:
    assert record_from_json(content) is None


@pytest.mark.parametrize(
    ("changes", "field", "what"),
    [
        ({"model": "other"}, "output", "a different model"),
        ({"data": "other"}, "output", "different data"),
        ({"rows": 11}, "output", r"different data \(10 rows; these have 11\)"),
        ({"rows_per_file": 6}, "rows_per_file", "begun with 5"),
        ({"keep": ()}, "keep", r"begun with \['id'\]"),
        ({"prediction_column": "score"}, "prediction_column", "begun with 'prediction'"),
        ({"options": {}}, "output_margin", "begun with True"),
        ({"options": {"output_margin": False}}, "output_margin", "begun with True"),
        ({"code": {"collate_fn": "5678"}}, "collate_fn", "begun with different code"),
        ({"code": {}}, "collate_fn", "begun with a function"),
        ({"options": {"output_margin": True, "x": 1}}, "x", "begun without it"),
    ],
)
def test_each_difference_is_named(changes: dict[str, Any], field: str, what: str) -> None:
    [problem] = record_problems(RECORD, replace(RECORD, **changes), place="there")
    assert problem.field == field
    assert re.search(what, problem.what)


def test_code_of_another_python_is_not_compared() -> None:
    other = replace(RECORD, python="3.12", code={"collate_fn": "5678"})
    assert not [*record_problems(RECORD, other, place="there")]


def test_options_are_values_or_code() -> None:
    options, code = split_options({"a": 1, "b": [1, "x"], "c": len, "d": {"e": lambda: 1}})
    assert options == {"a": 1, "b": [1, "x"]}
    assert sorted(code) == ["c", "d"]
