"""Values of Python and NumPy that Arrow would change without a word: times, text beside bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_DATES_AND_TIMES = (
    "has dates and times, of which dates would be left",
    "Give all as datetime.datetime, or all as datetime.date",
)
_TOGETHER = (
    (
        {_ZONED, _LOCAL},
        "has times with a zone and times without one",
        "Give all a zone, as with time.replace(tzinfo=…), or none",
    ),
    ({_DATE, _LOCAL}, *_DATES_AND_TIMES),
    ({_DATE, _ZONED}, *_DATES_AND_TIMES),
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


_FINE = {"s": "s", "ms": "ms", "us": "us", "ns": "ns", "ps": "ns", "fs": "ns", "as": "ns"}
_UNITS = {
    "M": {"Y": "D", "M": "D", "W": "D", "D": "D", "h": "s", "m": "s", **_FINE},
    "m": {"W": "s", "D": "s", "h": "s", "m": "s", **_FINE},
}
"""The unit in Arrow of times (M) and of durations (m). Months and years have no one length."""

_NAMES = {"M": "times", "m": "durations"}

_MOST_DAYS = 2**31 - 1
"""Arrow counts days with 32 bits."""


def is_time(value: Any) -> bool:
    """Whether this is a time or duration of NumPy, or an array of them."""
    return isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _UNITS


def in_unit_of_arrow(name: str, times: Any) -> Any:
    """Convert times or durations to a unit that Arrow has.

    Arrow itself refuses minutes and hours, and takes steps such as `[25s]` for single units.

    Args:
        times: a value or an array for which `is_time` holds.

    Raises:
        SourceError: there is none that holds all of them exactly.
    """
    kind = times.dtype.kind
    unit, step = np.datetime_data(times.dtype)
    known = times.dtype.name.partition("[")[0]
    if unit not in _UNITS[kind]:
        if unit == "generic":
            what, remedy = "without a unit", f'Give them one: array.astype("{known}[s]")'
        else:
            what = f"in units of {unit}, which have no one length"
            remedy = "Give them as numbers: array.astype(np.int64)"
        raise SourceError(f"{name!r} has {_NAMES[kind]} {what}", remedy)
    wanted = _UNITS[kind][unit]
    if wanted == unit != "D" and step == 1:
        return times
    found = times.astype(f"{known}[{wanted}]")
    if not _same(found, times):
        raise SourceError(
            f"{name!r} has {_NAMES[kind]} of type {times.dtype} that {known}[{wanted}] can't hold "
            "exactly",
            "Round them, or replace those out of range, and pass "
            f'array.astype("{known}[{wanted}]")',
        )
    if wanted == "D" and (np.abs(_numbers(found)[~np.isnat(found)]) > _MOST_DAYS).any():
        raise SourceError(
            f"{name!r} has dates millions of years away, which Arrow can't hold",
            'Replace them by a date, or by np.datetime64("NaT")',
        )
    return found


def in_one_unit(name: str, rows: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Convert several arrays of times, or of durations, to the finest of their units.

    Raises:
        SourceError: there is none that holds all of them exactly.
    """
    rows = [in_unit_of_arrow(name, row) for row in rows]
    wanted = np.result_type(*{row.dtype for row in rows})
    found = [row.astype(wanted) for row in rows]
    for times, row in zip(found, rows, strict=True):
        if not _same(times, row):
            raise SourceError(
                f"{name!r} has {_NAMES[wanted.kind]} of type {row.dtype} beside others of type "
                f"{wanted}, which can't hold them exactly",
                "Give all rows one unit",
            )
    return found


def _same(found: Any, times: Any) -> bool:
    # Out of range, numbers wrap around.
    return bool((_numbers(found.astype(times.dtype)) == _numbers(times)).all())


def _numbers(times: Any) -> Any:
    return np.asarray(times).view(np.int64)
