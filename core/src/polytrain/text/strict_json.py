"""Strictly valid JSON: NaN and infinities, which JSON lacks, are written as null. Pure.

Input is untrusted: its size is bounded, and any error is a ValueError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

NOT_FINITE = "not_finite"
"""The key of the places of such numbers: name → lists of keys and indices."""

DEEPEST = 100
"""Maximum levels of nesting; recursive code may need several calls for each."""

_LARGEST = 1 << 1023
"""The largest whole number that surely converts to a float."""


_ATOMS = frozenset({float, str, bool, type(None)})


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")


_encode = json.JSONEncoder(allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_no_constant).decode

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(entry: Mapping[str, Any]) -> str:
    """Return an object as JSON in one line.

    Raises:
        ValueError: `loads` wouldn't read it, because it is nested too deeply.
    """
    try:
        line = _encode(entry)
    except ValueError:
        line = _encode(plain(entry))
    if line.count("[") + line.count("{") > DEEPEST:
        expect_bounded(entry)
    return line


def plain(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object with null for numbers that aren't finite, and a list of their places."""
    places: dict[str, list[list[str | int]]] = {}
    for name, place in _not_finite(entry, []):
        places.setdefault(name, []).append(place)
    return {**_without(entry), NOT_FINITE: places} if places else entry


def loads(line: str | bytes) -> Any:
    """Parse the output of `dumps`.

    Raises:
        ValueError: it isn't JSON, or is nested too deeply, or has a number with too many digits.
    """
    text = line if isinstance(line, str) else line.decode()
    try:
        entry = _decode(text)
    except RecursionError:
        raise _too_deep() from None
    expect_bounded(entry)
    if isinstance(entry, dict) and NOT_FINITE in entry:
        try:
            _restore(entry, entry.pop(NOT_FINITE))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{NOT_FINITE} names a place that isn't there") from error
    return entry


def loads_to_show(line: str | bytes) -> Any:
    """Parse like `loads`, but make text printable: lone surrogates, as in file names, are replaced.

    Raises:
        ValueError: see `loads`.
    """
    entry = loads(line)
    text = line if isinstance(line, str) else line.decode()
    return _in_unicode(entry) if "\\ud" in text or "\\uD" in text else entry


def expect_bounded(value: Any, levels: int = DEEPEST) -> None:
    """Check that a value can be read again once it is written.

    Raises:
        ValueError: it has more levels, or a whole number too large for a float.
    """
    if isinstance(value, dict | list | tuple):
        if levels < 1:
            raise _too_deep()
        inside = value.values() if isinstance(value, dict) else value
        # Long lists usually have one type, so check the types, not each item.
        kinds = {*map(type, inside)}
        if kinds == {int}:
            inside = (min(inside), max(inside))
        elif kinds <= _ATOMS:
            return
        for inner in inside:
            if type(inner) not in _ATOMS:
                expect_bounded(inner, levels - 1)
    elif type(value) is int and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"a whole number has {value.bit_length()} bits")


def _too_deep() -> ValueError:
    return ValueError(f"it is nested in more than {DEEPEST} levels")


def _in_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(inner) for key, inner in value.items()}
    return [_in_unicode(inner) for inner in value] if isinstance(value, list) else value


def _restore(entry: Any, named: Mapping[str, list[list[str | int]]]) -> None:
    for name, places in named.items():
        for *path, last in places:
            inner = entry
            for key in path:
                inner = inner[key]
            if inner[last] is not None:
                raise ValueError(f"there is a value at {last!r}")
            inner[last] = _NAMES[name]


def _not_finite(value: Any, path: list[str | int]) -> Iterator[tuple[str, list[str | int]]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield str(float(value)), path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            # JSON writes number keys as strings.
            yield from _not_finite(inner, [*path, key if isinstance(key, str) else _encode(key)])
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_finite(inner, [*path, index])


def _without(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without(inner) for inner in value]
    return value
