"""Describes values for people: plain values as they are, objects by a short name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any
from uuid import UUID

from polytrain.text.plain_values import plain

LONGEST = 6000
"""Characters of a text that are kept."""

_MOST = 200
"""Items of a list, and names in a dict, that are kept."""

_DEEPEST = 20
_AS_TEXT = (PurePath, date, time, timedelta, Decimal, Fraction, UUID)
_COMPARABLE = (int, float, str, list, tuple, dict)


def described(value: Any, *, has_fields: bool = True, deepest: int = _DEEPEST) -> Any:
    """Return a value that JSON holds and people can read.

    Dicts, lists and dataclasses are described within; of a dataclass the fields that aren't its
    defaults. Arrays, tables and tensors are named by type and shape, functions and other objects by
    name: no object is asked for its text, which may be long, slow to make, or secret.

    Args:
        value: any value.
        has_fields: whether dataclasses are described by their fields, and not by name.
        deepest: levels of nesting; what is deeper is named by its type.
    """
    if type(value).__module__ == "numpy":
        value = plain(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (str, *_AS_TEXT)):
        return shortened(str(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if has_fields and is_dataclass(value) and not isinstance(value, type):
        value = given_fields(value)
    if isinstance(value, Mapping | list | tuple | AbstractSet) and not deepest:
        return type(value).__qualname__
    inner = partial(described, has_fields=has_fields, deepest=deepest - 1)
    if isinstance(value, Mapping):
        first = islice(value.items(), _MOST)
        found = {shortened(str(key)): inner(each) for key, each in first}
        more = len(value) - len(found)
        return {**found, "…": f"{more} more"} if more > 0 else found
    if isinstance(value, list | tuple | AbstractSet):
        items = [inner(each) for each in islice(value, _MOST)]
        more = len(value) - len(items)
        # The order of a set changes from process to process.
        ordered = sorted(items, key=str) if isinstance(value, AbstractSet) else items
        return [*ordered, f"… {more} more"] if more > 0 else ordered
    return _name(value)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return text that any store can hold, with at most this many characters."""
    # Arguments and names of files may have bytes that aren't UTF-8.
    printable = text.encode(errors="replace").decode()
    return printable if len(printable) <= longest else f"{printable[: longest - 1]}…"


def given_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that aren't its defaults.

    What its class doesn't take as an argument is left out.
    """
    return {
        each.name: getattr(value, each.name)
        for each in fields(value)
        if each.init and not is_default(getattr(value, each.name), each)
    }


def is_default(value: Any, field: Field[Any]) -> bool:
    """Whether a field of a dataclass has its default; no for one that would have to be read."""
    made = field.default_factory
    default = field.default if made is MISSING else made()
    if value is default:
        return True
    # Of other types comparing may give an array, or read data.
    if not (is_dataclass(value) or isinstance(value, _COMPARABLE)):
        return False
    if is_dataclass(value) and type(value) is not type(default):
        return False
    return bool(described(value) == described(default))


def _name(value: Any) -> str:
    """Return a short name of an object: of an array, table or tensor its type and shape."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value)
    try:
        shape = "×".join(str(int(each)) for each in value.shape)
        return f"{kind.__qualname__}({shape})"
    except Exception:  # any object may have a `shape`, of any kind
        own = getattr(value, "__qualname__", None)
    return own if isinstance(own, str) else kind.__qualname__
