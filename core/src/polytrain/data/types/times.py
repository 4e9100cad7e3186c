"""Brings NumPy's times and durations to the units that Arrow has, which are fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polytrain.data_errors import SourceError

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
        name: of the column.
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

    Args:
        name: of the column.
        rows: at least one array.

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
