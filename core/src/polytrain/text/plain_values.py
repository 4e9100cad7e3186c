"""Converts NumPy's scalars to Python's."""

from __future__ import annotations

import copy
from dataclasses import fields
from numbers import Integral
from typing import Any, TypeVar

AnyDataclass = TypeVar("AnyDataclass")


def plain(value: Any) -> Any:
    """Return a value with Python scalars for NumPy's, also within lists, tuples and dicts.

    A value without NumPy scalars is returned itself, not as a copy.
    """
    if type(value) is dict:
        values = {name: plain(each) for name, each in value.items()}
        return values if any(values[name] is not value[name] for name in value) else value
    if type(value) in (list, tuple):
        items = [plain(each) for each in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if changed else value
    # Check without importing NumPy.
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def with_plain_fields(given: AnyDataclass) -> AnyDataclass:
    """Return a dataclass with plain fields: the given one, or a copy if some weren't plain."""
    values = {each.name: getattr(given, each.name) for each in fields(given)}  # type: ignore[arg-type]  # any dataclass
    changed = {name: new for name, old in values.items() if (new := plain(old)) is not old}
    if not changed:
        return given
    copied = copy.copy(given)
    for name, value in changed.items():
        # Most of these dataclasses are frozen.
        object.__setattr__(copied, name, value)
    return copied


def is_whole(value: Any) -> bool:
    """Return whether it is a whole number, of any library; True and False don't count."""
    return isinstance(value, Integral) and not isinstance(value, bool)
