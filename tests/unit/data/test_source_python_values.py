"""Python's values in lists, arrays, frames and dicts: exact, or refused with a remedy."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.shards import shard_of

from polytrain.data_errors import SourceError

DAY = datetime.date(2024, 1, 1)
NOON = datetime.datetime(2024, 1, 1, 12)
NANOSECOND = pd.Timestamp("2024-01-01 12:00:00.000000001")

FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda values: {"t": values},
    "objects": lambda values: {"t": _objects(values)},
    "series": lambda values: {"t": pd.Series(values, dtype=object)},
    "frame": lambda values: pd.DataFrame({"t": pd.Series(values, dtype=object)}),
    "dicts": lambda values: [{"t": value} for value in values],
    "lists in a list": lambda values: {"t": [values, values]},
    "lists in dicts": lambda values: [{"t": values}, {"t": values[:2]}],
    "lists in a frame": lambda values: pd.DataFrame({"t": [values, values]}),
    "dicts in dicts": lambda values: [{"t": {"at": value}} for value in values],
    "tuples in objects": lambda values: {"t": _objects([tuple(values), tuple(values[:2])])},
}


def _objects(values: list[Any]) -> np.ndarray[Any, Any]:
    found = np.empty(len(values), object)
    found[:] = values
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([DAY, NOON], "dates and times"),
        ([NOON, DAY], "dates and times"),
        ([None, DAY, pd.Timestamp(NOON)], "dates and times"),
        ([NANOSECOND, NANOSECOND], "nanoseconds"),
        ([NOON, NANOSECOND], "nanoseconds"),
        ([datetime.timedelta(1), pd.Timedelta(1, "ns")], "nanoseconds"),
        ([datetime.time(5, tzinfo=datetime.UTC)], "times of day with a zone"),
        (["text", b"bytes", "text"], "text and bytes"),
        ([b"bytes", "text", b"bytes"], "text and bytes"),
    ],
)
def test_what_arrow_would_change(form: str, values: list[Any], what: str) -> None:
    with pytest.raises(SourceError, match=f"'t' has {what}"):
        shard_of(FORMS[form](values))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "values",
    [
        [DAY, DAY, None],
        [NOON, pd.Timestamp(NOON), None],
        [datetime.timedelta(1), pd.Timedelta(1, "us"), None],
        [datetime.time(5), None],
        [b"bytes", bytearray(b"bytes"), None],
    ],
)
def test_what_arrow_keeps(form: str, values: list[Any]) -> None:
    [batch] = shard_of(FORMS[form](values)).iter_batches(batch_size=9, format="arrow")
    found = batch.column("t").to_pylist()
    while isinstance(found[0], list | dict):
        first = found[0]
        found = first if isinstance(first, list) else [value["at"] for value in found]
    assert found == values


@pytest.mark.parametrize("form", ["lists in a list", "lists in dicts", "tuples in objects"])
@pytest.mark.parametrize(
    "values", [["a", 1], ["a", 0.5], ["a", True], ["a", float("nan")], [b"a", 1], [["a"], [1]]]
)
def test_numbers_beside_texts_in_lists_are_no_texts(form: str, values: list[Any]) -> None:
    with pytest.raises(SourceError, match=r"'t' (can't become a column|has rows of)"):
        shard_of(FORMS[form](values))


@pytest.mark.parametrize("form", ["list", "lists in a list", "lists in dicts", "lists in a frame"])
@pytest.mark.parametrize("values", [["a\0", "b"], [b"a\0", b"\0\0"]])
def test_zeros_at_the_end_of_text_and_bytes_arrive(form: str, values: list[Any]) -> None:
    [batch] = shard_of(FORMS[form](values)).iter_batches(batch_size=9)
    found = batch["t"].tolist() if form == "list" else batch["t"][0].tolist()
    assert found == values
