"""Describes values and lists of them for people: plain values, objects in one line. Pure."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import PurePath
from typing import Any, TypeVar
from uuid import UUID

from polytrain.text.secret_names import HIDDEN, is_secret, without_credentials

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
    """Return whether it is a whole number of 64 bits, of any library, and no truth value."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return is_number and -(2**63) <= value < 2**63


LONGEST = 6000
"""Characters of a text that are kept."""

_MOST = 200
"""Items of a list, and names in a dict, that are kept."""

_DEEPEST = 20
_MOST_BITS = 1023
_AS_TEXT = (PurePath, date, time, timedelta, Decimal, Fraction, UUID)
_COMPARABLE = (int, float, str, list, tuple, dict)


def described(value: Any, *, has_fields: bool = True, deepest: int = _DEEPEST) -> Any:
    """Return a value that JSON holds and people can read.

    Dicts, lists and dataclasses are described within; of a dataclass the fields that aren't its
    defaults. Arrays, tables and tensors are named by type and shape, functions and other objects by
    name: no object is asked for its text, which may be long, slow to make, or secret.

    Args:
        has_fields: whether dataclasses are described by their fields, and not by name.
        deepest: levels of nesting; what is deeper is named by its type.
    """
    if type(value).__module__ == "numpy":
        value = plain(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (str, *_AS_TEXT)):
        return shortened(str(value))
    if type(value) is int and value.bit_length() > _MOST_BITS:
        # A number that JSON's readers can't take.
        return shortened(hex(value))
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


def shown_name(name: str) -> str:
    """Return a name that somebody else has chosen, with escapes if it could control a terminal."""
    return name if name.isprintable() else repr(name)


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


_LONGEST = 400
"""Characters between an object's brackets."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = 4
        self.maxstring = self.maxother = 200
        self.fillvalue = "…"

    def repr1(self, x: Any, level: int) -> str:
        # Of itself it is short already.
        return repr(x) if isinstance(x, ShortRepr) else super().repr1(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_credentials(x), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 and x:
            return "{…}"
        shown = [
            f"{key!r}: {HIDDEN if is_secret(str(key)) else self.repr1(value, level - 1)}"
            for key, value in list(x.items())[: self.maxdict]
        ]
        more = [HIDDEN] if len(x) > self.maxdict else []
        return f"{{{', '.join([*shown, *more])}}}"


_SHORT = _Short()


class ShortRepr:
    """A dataclass whose `repr` has the fields that aren't its defaults, each cut if it is long."""

    __slots__ = ()

    def __repr__(self) -> str:
        given: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]  # all that derive from it are dataclasses
        parts = (
            f"{each.name}={_SHORT.repr(getattr(self, each.name))}"
            for each in given
            if each.repr and not is_default(getattr(self, each.name), each)
        )
        text = ", ".join(parts)
        return f"{type(self).__name__}({text if len(text) <= _LONGEST else text[:_LONGEST] + '…'})"


def first_few(shown: Sequence[str], most: int, *, of: str = "") -> str:
    """Return the first few of these texts, and how many others there are: "a, b and 3 more".

    Args:
        of: what they are, to be said with the number of the others.
    """
    others = len(shown) - most
    few = ", ".join(shown[:most])
    return few if others <= 0 else f"{few} and {others} more{f' {of}' if of else ''}"


def numbered(count: int, noun: str, verb: str = "") -> str:
    """Return a count with its noun: "1 worker", "2 workers", and, with "need", "1 worker needs".

    Args:
        noun: what, in the singular.
        verb: what more than one do.
    """
    if count != 1:
        return " ".join(filter(None, (f"{count} {noun}s", verb)))
    return " ".join(filter(None, (f"1 {noun}", _OF_ONE.get(verb, verb and f"{verb}s"))))


_OF_ONE = {"are": "is", "have": "has"}
"""Verbs whose singular isn't made with an "s"."""


def resource_amount(name: str, amount: float) -> str:
    """Return an amount of one of Ray's resources: "2 CPU", "23.5 GiB of memory"."""
    if name == "memory":
        return f"{round(amount / 2**30, 1):g} GiB of memory"
    return f"{amount:g} {name}"
