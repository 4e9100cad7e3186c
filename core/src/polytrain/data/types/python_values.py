"""Values of Python that Arrow would change without a word: times, and text beside bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from polytrain.data_errors import SourceError

_Path: TypeAlias = tuple[Any, ...]

_OBJECTS = np.dtype(object)

_NANOSECONDS = "nanoseconds"
_ZONED_TIME = "time of day with a zone"
_ALONE = {
    _NANOSECONDS: (
        "has nanoseconds, which Python's times have no place for",
        "Give NumPy's or pandas' type: datetime64[ns], timedelta64[ns]",
    ),
    _ZONED_TIME: (
        "has times of day with a zone, which would be lost",
        "Give datetimes with a zone, or times of day without one",
    ),
}
"""Kinds of Python values that no Arrow column can hold."""

_DATE, _ZONED, _LOCAL, _TEXT, _BYTES = "date", "zoned", "local", "text", "bytes"
_TOGETHER = (
    (
        {_ZONED, _LOCAL},
        "has times with a zone and times without one",
        "Give all a zone, as with time.replace(tzinfo=…), or none",
    ),
    (
        {_DATE, _LOCAL},
        "has dates and times, of which dates would be left",
        "Give all as datetime.datetime, or all as datetime.date",
    ),
    (
        {_DATE, _ZONED},
        "has dates and times, of which dates would be left",
        "Give all as datetime.datetime, or all as datetime.date",
    ),
    (
        {_TEXT, _BYTES},
        "has text and bytes, of which bytes would be made",
        "Give one of them: text.encode() or bytes.decode()",
    ),
)
"""Kinds of Python values that one Arrow column can't mix."""


def check_unchanged(name: str, values: Any, kind: pa.DataType | None) -> None:
    """Refuse values that lose something in a column, or become equal to others.

    Args:
        name: of the column.
        values: of its rows, as they were given. All but objects of Python are left alone.
        kind: the column's type; None if Arrow found none.

    Raises:
        SourceError: there are some. It says what to give instead.
    """
    # Arrays of one type have no such values.
    if not isinstance(values, Iterable) or getattr(values, "dtype", _OBJECTS) != _OBJECTS:
        return
    if kind is not None and not _may_change(kind):
        return
    found: dict[_Path, set[str]] = {}
    for path, value in _single((), values):
        sort = _sort(value)
        if sort in _ALONE:
            what, remedy = _ALONE[sort]
            raise SourceError(f"{name!r} {what}", remedy)
        if sort is not None:
            found.setdefault(path, set()).add(sort)
    for there in found.values():
        for sorts, what, remedy in _TOGETHER:
            if sorts <= there:
                raise SourceError(f"{name!r} {what}", remedy)


_SAY_LITTLE = (list, tuple, Mapping, np.ndarray, datetime, time, timedelta)
"""Types that hold others, or values of several kinds."""


def _may_change(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_may_change(kind.field(index).type) for index in range(kind.num_fields))
    return any(
        could(kind) for could in (pa.types.is_temporal, pa.types.is_string, pa.types.is_binary)
    )


def _single(path: _Path, values: Iterable[Any]) -> Iterator[tuple[_Path, Any]]:
    """Yield values within lists and dicts, each with the keys of the dicts that it is in.

    If the type of a value says all about it, one value of each type is enough.
    """
    types = {type(value): value for value in values}
    says_all = not any(issubclass(kind, _SAY_LITTLE) for kind in types)
    for value in types.values() if says_all else values:
        if isinstance(value, list | tuple) or _is_array_of_objects(value):
            yield from _single(path, value)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from _single((*path, key), (inner,))
        else:
            yield path, value


def _is_array_of_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == _OBJECTS and value.ndim > 0


def _sort(value: Any) -> str | None:
    """The kind of a value, if it is one of those above."""
    if isinstance(value, str):
        return _TEXT
    if isinstance(value, bytes | bytearray):
        return _BYTES
    if isinstance(value, datetime):
        # What is missing in pandas is a time, and unequal to itself.
        if value != value:
            return None
        # Pandas' times are Python's, and have this.
        if getattr(value, "nanosecond", 0):
            return _NANOSECONDS
        return _LOCAL if value.tzinfo is None else _ZONED
    if isinstance(value, date):
        return _DATE
    if isinstance(value, timedelta):
        return _NANOSECONDS if getattr(value, "nanoseconds", 0) else None
    return _ZONED_TIME if isinstance(value, time) and value.tzinfo is not None else None
