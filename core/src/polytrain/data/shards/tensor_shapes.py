"""Whether columns can become tensors: their rows must have one shape."""

from __future__ import annotations

from typing import Any

import numpy as np


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
