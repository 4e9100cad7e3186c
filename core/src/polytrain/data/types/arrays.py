"""Turns arrays of any library into columns."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.types.nested import nested_lists, tensors_of
from polytrain.data.types.plain import plain_column
from polytrain.data.types.python_values import (
    check_unchanged,
    in_one_unit,
    in_unit_of_arrow,
    is_time,
)
from polytrain.data_errors import SourceError, one_line

_EXACT = 2**53
"""A 64-bit float holds every whole number up to here."""

_REMEDY = "Give an array with a row for each example, of numbers, booleans or strings"


def table_of(arrays: Mapping[Any, Any]) -> pa.Table:
    """Arrays of equal length by name, as a table.

    Raises:
        SourceError: one can't become a column, or they differ in length.
    """
    columns = {str(name): column_of(str(name), value) for name, value in arrays.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise SourceError(f"its arrays differ in length ({listed})", "Give all the same length")
    return pa.table(columns)


def column_of(name: str, value: Any) -> pa.Array | pa.ChunkedArray:
    """An array of one dimension as a column, of more as a column of tensors.

    Raises:
        SourceError: neither will do.
    """
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value
    if type(value).__module__.startswith("scipy.sparse"):
        raise SourceError(
            f"{name!r} is a sparse matrix, which batches have no form for",
            "Pass an array: matrix.toarray()",
        )
    if isinstance(value, deque | UserList):
        value = list(value)
    if isinstance(value, list | tuple):
        value = _without_masks(name, value)
    column = _converted(name, value)
    check_unchanged(name, value, column.type)
    return column


def _converted(name: str, value: Any) -> pa.Array | pa.ChunkedArray:
    try:
        found = _of_one_dimension(name, value)
        if found is not None:
            return found
        # A tensor that has a gradient refuses to become an array.
        array = np.asarray(value.detach() if hasattr(value, "detach") else value)
        if array.dtype.kind == "f" and isinstance(value, list | tuple):
            check_exact(value, array)
        array = _readable(array)
        if is_time(array):
            array = in_unit_of_arrow(name, array)
        if array.ndim == 1 and array.dtype == object and any(map(is_time, array)):
            return pa.array([in_unit_of_arrow(name, it) if is_time(it) else it for it in array])
        if array.ndim == 1:
            return pa.array(array)
        _refuse_masks(name, value)
        if array.ndim and array.size and array.dtype.kind in "iufb":
            return tensors_of(array)
    except (pa.ArrowException, TypeError, ValueError, RuntimeError, OverflowError) as error:
        check_unchanged(name, value, None)
        raise SourceError(f"{name!r} can't become a column: {one_line(error)}", _REMEDY) from error
    if array.ndim == 0 or array.dtype.kind not in "iufb":
        what = f"{name!r} is an array of shape {array.shape} and type {array.dtype}"
        raise SourceError(what, _REMEDY)
    if len(array) == 0:
        # A column of no tensors: Arrow can't make one from an empty array.
        return pa.array([], pa.null())
    raise SourceError(f"{name!r} has rows without values: its shape is {array.shape}", _REMEDY)


def refuse_objects(types: Mapping[str, Any]) -> None:
    """Refuse columns of polars that hold Python's objects: Arrow would get their addresses.

    Raises:
        SourceError: there is one.
    """
    for name, kind in types.items():
        if repr(kind) == "Object":
            raise SourceError(
                f"the column {name!r} holds Python objects, which arrays have no form for",
                "Give its values another type of polars, or leave it out with columns=[…]",
            )


def _readable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in a type that Arrow takes without loss."""
    if array.dtype.kind in "SUT":
        # Arrow takes a zero in a text or bytes for its end, and doesn't know NumPy's newest texts.
        return array.astype(object)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def is_masked_number(value: Any) -> bool:
    """Whether this is a missing number of a masked array."""
    return isinstance(value, np.ma.MaskedArray) and value.ndim == 0 and np.ma.is_masked(value)


def _without_masks(name: str, rows: Sequence[Any]) -> Sequence[Any]:
    """The rows with None for masked ones: NumPy would make an array of what is behind masks."""
    if not any(isinstance(row, np.ma.MaskedArray) for row in rows):
        return rows
    found = [None if is_masked_number(row) else row for row in rows]
    for row in found:
        _refuse_masks(name, row)
    return found


def _refuse_masks(name: str, value: Any) -> None:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        what = f"{name!r} has masked values in its rows, and a tensor has no place for them"
        raise SourceError(what, "Fill them in: array.filled(0)")


def _of_one_dimension(name: str, value: Any) -> pa.Array | pa.ChunkedArray | None:
    """Convert what NumPy would change: masks, missing values, text, rows of different shapes."""
    if isinstance(value, np.ma.MaskedArray):
        if value.ndim != 1:
            return None
        if is_time(value):
            return pa.array(in_unit_of_arrow(name, value.filled(value.dtype.type("NaT"))))
        return pa.array(_readable(value.data), mask=np.ma.getmaskarray(value))
    library = type(value).__module__.partition(".")[0]
    of_pandas = library == "pandas" and type(value).__name__ in ("Series", "Categorical")
    if of_pandas or hasattr(value, "__arrow_array__"):
        return pa.array(value, from_pandas=True)
    if library == "polars" and type(value).__name__ == "Series":
        refuse_objects({name: value.dtype})
        return plain_column(pa.chunked_array(value))
    ragged = _ragged(name, value)
    if ragged is not None:
        return ragged
    if isinstance(value, list | tuple) and any(isinstance(row, str | bytes) for row in value):
        return pa.array(value)
    return None


_FAMILIES = dict.fromkeys("iufb", "number")
"""Kinds of NumPy's types that go together in a column."""


def check_exact(value: Any, array: np.ndarray[Any, Any]) -> None:
    """Refuse numbers if a whole one among them is rounded in the array of floats.

    Raises:
        ValueError: one is.
    """
    if not (np.abs(array) >= _EXACT).any():
        return
    for number in np.asarray(value, dtype=object).flat:
        if isinstance(number, int | np.integer) and int(float(number)) != number:
            raise ValueError(f"float64, the one type for all of them, would round {number}")


def _ragged(name: str, value: Any) -> pa.Array | None:
    """Lists or arrays of numbers whose shapes differ, as a column; None if it is anything else.

    An array of arrays is taken for that, whatever their shapes are; so are lists of times or texts,
    which no tensor has a place for.

    Raises:
        SourceError: rows have types that have none in common, or times that Arrow can't hold.
    """
    is_array = isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1
    if not is_array and not isinstance(value, list | tuple):
        return None
    if not any(isinstance(row, list | tuple | np.ndarray) for row in value):
        return None
    try:
        rows = [None if row is None else np.asarray(row) for row in value]
    except ValueError:  # lists that differ within a row, which Arrow takes as lists
        return pa.array(value)
    there = [row for row in rows if row is not None]
    dimensions = {row.ndim for row in there}
    if 0 in dimensions:
        return None
    if len(dimensions) > 1:
        # An array without rows has room for lists of any depth, and gives no type.
        return pa.array(
            [
                [] if row is not None and row.shape == (0,) else _in_lists(given)
                for given, row in zip(value, rows, strict=True)
            ]
        )
    # Empty lists have numbers of no type.
    kinds = dict.fromkeys(row.dtype for row in there if row.size or is_array)
    if any(kind.kind not in "iufb" for kind in kinds):
        return _lists(name, value, rows, list(kinds))
    if not kinds:
        return nested_lists(rows, dimensions.pop(), pa.null())
    differ = len(there) < len(rows) or len({row.shape for row in there}) > 1
    if not (is_array or differ):
        return None
    kind = np.result_type(*kinds)
    if kind.kind == "f":
        for given, row in zip(value, rows, strict=True):
            if row is not None:
                check_exact(given, row)
    return nested_lists(rows, dimensions.pop(), pa.from_numpy_dtype(kind))


def _lists(
    name: str,
    given: Iterable[Any],
    rows: Sequence[np.ndarray[Any, Any] | None],
    kinds: Sequence[np.dtype[Any]],
) -> pa.Array:
    """Make a column of lists of rows that aren't all numbers.

    Args:
        given: the rows as they were given.
        rows: the same as arrays, in which numbers beside texts are texts, and bytes end before
            zeros.
        kinds: the arrays' types.
    """
    families = {_FAMILIES.get(kind.kind, kind.kind) for kind in kinds}
    # Objects are values among which some are missing, or times of Python.
    if len(families) > 1 and families not in ({"O", "number"}, {"O", "U"}):
        check_unchanged(name, given, None)
        listed = " and ".join(dict.fromkeys(map(str, kinds)))
        raise SourceError(f"{name!r} has rows of {listed}", "Give all rows one type")
    if kinds[0].kind not in "mM":
        return pa.array([_plain(row) for row in given])
    times = in_one_unit(name, [row for row in rows if row is not None and is_time(row)])
    there = iter(times)
    # Empty lists without a type stay as they are.
    found = [next(there) if is_time(row) else row for row in rows]
    return nested_lists(found, times[0].ndim, pa.from_numpy_dtype(times[0].dtype))


def _in_lists(row: Any) -> Any:
    """A row as nested lists of arrays of numbers, which keep their type."""
    is_nested = isinstance(row, np.ndarray) and (row.ndim > 1 or row.dtype == object)
    return [_in_lists(each) for each in row] if is_nested or isinstance(row, list | tuple) else row


def _plain(row: Any) -> Any:
    """A row as nested lists of Python's values."""
    if isinstance(row, list | tuple):
        return [_plain(value) for value in row]
    return row.tolist() if isinstance(row, np.ndarray) else row
