"""JSON that every reader takes: NaN and infinities, which it hasn't, are written as null. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

NOT_FINITE = "not_finite"
"""The key of the places of such numbers: by name, lists of keys and indices."""

_encode = json.JSONEncoder(allow_nan=False).encode

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(entry: Mapping[str, Any]) -> str:
    """Return an object as JSON in one line."""
    try:
        return _encode(entry)
    except ValueError:
        return _encode(plain(entry))


def plain(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object of which every number is finite, with the places of those that aren't."""
    places: dict[str, list[list[str | int]]] = {}
    for name, place in _not_finite(entry, []):
        places.setdefault(name, []).append(place)
    return {**_without(entry), NOT_FINITE: places} if places else entry


def loads(line: str | bytes) -> Any:
    """Read what `dumps` has written.

    Raises:
        ValueError: it isn't JSON.
    """
    entry = json.loads(line)
    if isinstance(entry, dict) and NOT_FINITE in entry:
        try:
            _restore(entry, entry.pop(NOT_FINITE))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{NOT_FINITE} names a place that isn't there") from error
    return entry


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
            # Numbers become text where they are keys.
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
