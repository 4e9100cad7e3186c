"""The rows that a user passes to an estimator, as tables and columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.utils.validation import check_array, check_consistent_length, column_or_1d

from polytrain.data.types.plain import plain_columns
from polytrain.text.described import numbered
from polytrain_plugins.type_names import a_type

Values = np.ndarray[Any, Any]
EvalSet = tuple[Any, ...]

LABEL, WEIGHT = "polytrain label", "polytrain weight"
SCORE, QUERY = "polytrain score", "polytrain query"
"""Columns beside the features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A data set, as a user passes it to an estimator."""

    X: Any
    y: Any
    weight: Any = None
    score: Any = None
    """The initial score of each row."""

    query: Any = None


def evaluation_sets(eval_set: Iterable[EvalSet] | None, **facts: Any) -> list[Rows]:
    """Return the evaluation sets.

    Args:
        eval_set: pairs of features and labels, or triples with each row's query.
        facts: argument name → one entry for each data set, or None.

    Raises:
        ValueError: an argument doesn't have one entry for each data set.
    """
    # Both libraries' estimators accept one pair in place of a list.
    sets = [eval_set] if isinstance(eval_set, tuple) else list(eval_set or ())
    found: list[dict[str, Any]] = [
        dict(zip(("X", "y", "query"), each, strict=False)) for each in sets
    ]
    for name, values in facts.items():
        if values is None:
            continue
        if isinstance(values, Mapping):
            values = [values.get(number) for number in range(len(sets))]
        if len(values) != len(sets):
            raise ValueError(
                f"{name} has {len(values)} entries, and eval_set has {len(sets)}. Give one for "
                "each data set, None for none"
            )
        for columns, value in zip(found, values, strict=True):
            if value is not None:
                columns[_FACTS[name]] = queries_of(value) if name == "eval_group" else value
    return [Rows(**columns) for columns in found]


_FACTS = {
    "sample_weight_eval_set": "weight",
    "eval_sample_weight": "weight",
    "base_margin_eval_set": "score",
    "eval_init_score": "score",
    "eval_group": "query",
    "eval_qid": "query",
}
"""Argument of `fit` → the field of `Rows` that it sets for each evaluation set."""


def queries_of(sizes: Any) -> Values:
    """Return each row's query number, shape `[rows]`, from the queries' sizes, `[queries]`."""
    counts = column_or_1d(sizes)
    return np.repeat(np.arange(len(counts)), counts)


def table_of(frame: Any) -> pa.Table:
    """Return a frame as an Arrow table.

    Raises:
        TypeError: the frame isn't in memory.
    """
    if isinstance(frame, pa.Table):
        return plain_columns(frame)
    if isinstance(frame, pd.DataFrame):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if hasattr(frame, "__arrow_c_stream__"):
        # For example, a polars DataFrame, whose strings Arrow can't cast in every way.
        return plain_columns(pa.table(frame))
    raise TypeError(
        f"X is {a_type(frame)} of {type(frame).__module__}, which isn't a table in memory. Pass a "
        "DataFrame of pandas or polars, an Arrow table or an array (of a LazyFrame, "
        "frame.collect())."
    )


def without(table: pa.Table, missing: float | None) -> pa.Table:
    """Return the table with nulls in place of the number that stands for missing values."""
    if missing is None or np.isnan(missing):
        return table
    for index, column in enumerate(table.columns):
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            continue
        # The libraries compare in float32 too.
        same = pc.equal(column.cast(pa.float32(), safe=False), pa.scalar(missing, pa.float32()))
        kept = pc.if_else(same, pa.scalar(None, kind), column)
        table = table.set_column(index, table.field(index).name, kept)
    return table


def numbers(values: Any) -> Values:
    """Return labels as float64, shape `[rows]`."""
    checked: Values = check_array(
        column_or_1d(values, warn=True), dtype=np.float64, ensure_2d=False, input_name="y"
    )
    return checked


def weights_of(weights: Any, rows: Any) -> Values:
    """Return the weights as float64, shape `[rows]`.

    Raises:
        ValueError: all weights are 0, or there isn't one for each row.
    """
    checked = numbers(weights)
    check_consistent_length(rows, checked)
    if not checked.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return checked


def scores_of(scores: Any, rows: Any, name: str) -> Values:
    """Return the initial scores as float64, shape `[rows]`.

    Raises:
        ValueError: there isn't one score for each row.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim == 2 and values.shape[1] > 1:
        raise ValueError(
            f"{name} has {values.shape[1]} scores for each row, and one is possible here. "
            "Train one classifier for each class, or use a training function"
        )
    checked: Values = values.ravel()
    check_consistent_length(rows, checked)
    return checked


def renamed(table: pa.Table, names: Sequence[str], argument: str) -> pa.Table:
    """Return the table with renamed columns.

    Raises:
        ValueError: there isn't one name for each column.
    """
    if len(names) != table.num_columns:
        columns = numbered(table.num_columns, "column")
        raise ValueError(f"{argument} has {numbered(len(names), 'name')}, and X has {columns}")
    return table.rename_columns(list(names))
