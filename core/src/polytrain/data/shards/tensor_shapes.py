"""Whether columns can become tensors: of one shape, and of a type that holds their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polytrain_plugins import column_remedy


class TensorShapes:
    """The shapes of the rows of a data set's columns, of which a tensor can hold one only."""

    def __init__(self, dataset: str, remedy: str) -> None:
        """
        Args:
            dataset: the data set's name, for messages.
            remedy: what to do if rows differ in shape.
        """
        self._dataset = dataset
        self._remedy = remedy
        self._shapes: dict[str, tuple[int | None, ...]] = {}

    def check(self, name: str, rows: np.ndarray[Any, Any]) -> None:
        """Look at one batch of a column.

        Raises:
            TypeError: rows differ in shape, from each other or from those of an earlier batch.
        """
        for shape in _shapes(rows):
            first = self._shapes.setdefault(name, shape)
            if None in shape:
                raise self._error(name, "lists in one row differ in length")
            if shape != first:
                raise self._error(
                    name, f"one row has {_described(first)}, another {_described(shape)}"
                )

    def _error(self, name: str, why: str) -> TypeError:
        return TypeError(
            f"The column {name!r} of the data set {self._dataset!r} can't become a tensor: {why}. "
            f"{self._remedy}"
        )


def check_range(name: str, values: np.ndarray[Any, Any], least: int, most: int) -> None:
    """Refuse values that a type of whole numbers turns into others.

    Args:
        name: of the column.
        values: some of its rows.
        least: the smallest number that the type has.
        most: the largest.

    Raises:
        ValueError: one is out of this range, or missing.
    """
    if values.dtype.kind not in "iuf" or not values.size:
        return
    # As Python's numbers, which are compared exactly.
    lowest, highest = values.min().item(), values.max().item()
    if np.isnan(lowest):
        what = "a missing value or NaN, which whole numbers have no place for"
    elif lowest < least or highest > most:
        outside = lowest if lowest < least else highest
        what = f"{outside}, and the type asked for ends at {least} and {most}"
    else:
        return
    raise ValueError(
        f"The column {name!r} has {what}. Ask for a type that holds all values, or replace them in "
        "DataConfig(transform=…)"
    )


def check_named(types: Any, columns: Sequence[str]) -> None:
    """Refuse types for columns that aren't there.

    Args:
        types: what the user asks for: a dict of column to type, or one type for all.
        columns: the data set's.

    Raises:
        ValueError: a name is none of them.
    """
    for name in types if isinstance(types, Mapping) else ():
        if name not in columns:
            raise ValueError(
                f"dtypes names the column {name!r}, which isn't there. "
                f"{column_remedy(name, columns)}."
            )


def _shapes(rows: np.ndarray[Any, Any]) -> list[tuple[int | None, ...]]:
    """The shapes of rows, or one for all; nothing of what isn't made of arrays."""
    if rows.dtype != object:
        return [rows.shape[1:]] if len(rows) else []
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    if not arrays or any(_holds_words(row) for row in arrays):
        return []
    return [_shape(row) for row in rows]


def _holds_words(row: np.ndarray[Any, Any]) -> bool:
    return row.dtype == object and not any(isinstance(item, np.ndarray) for item in row)


def _shape(row: Any) -> tuple[int | None, ...]:
    if row is None:
        return ()
    # An array of arrays: those differ.
    return (len(row), None) if row.dtype == object else tuple(row.shape)


def _described(shape: tuple[int | None, ...]) -> str:
    if not shape:
        return "no list"
    return f"length {shape[0]}" if len(shape) == 1 else f"shape {shape}"
