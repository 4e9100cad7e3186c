"""Checks of columns that become tensors: one shape, and a type that holds their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polytrain_plugins import column_remedy


class TensorShapes:
    """Checks that all rows of a column have one shape, also in different batches."""

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
        """Check one batch of a column.

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
    """Check that a type of whole numbers can hold values.

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
    """Check that a data set has the columns for which types are given.

    Args:
        types: a dict of column to type, or one type for all.
        columns: the data set's.

    Raises:
        ValueError: it has no column of that name.
    """
    for name in types if isinstance(types, Mapping) else ():
        if name not in columns:
            raise ValueError(
                f"dtypes names the column {name!r}, which isn't there. "
                f"{column_remedy(name, columns)}."
            )


def _shapes(rows: np.ndarray[Any, Any]) -> list[tuple[int | None, ...]]:
    """The shapes of rows, or one for all of them; [] if rows aren't arrays."""
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
