"""Reads untrusted JSON into declared types. Pure.

Annotations declare the types. A value that doesn't fit is an error that names file and field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from polytrain.errors import DamagedFileError
from polytrain.text import strict_json

Kind = TypeVar("Kind")
_Reader = Callable[[Any, str], Any]

_SHOWN = 60
"""Maximum characters of a value in an error."""


@dataclass(frozen=True, slots=True)
class Within:
    """Inclusive bounds of a number. A number without bounds may be NaN or infinite."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Like:
    """A pattern that a whole string must match."""

    pattern: str
    what: str
    """The name of such strings, for the error."""


UNSTORED: Mapping[str, Any] = {"stored": False}
"""Metadata of a dataclass's field that JSON lacks; reading sets its default."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The type that JSON holds instead of a value, and from which the value is made."""

    hint: Any
    made: Callable[[Any], Any]


Count = Annotated[int, Within(0, 2**62)]
"""A number of steps, rows or bytes: a sum of two fits in 64 bits."""

Ranks = Annotated[int, Within(0, 10**6)]
"""A rank, or a number of ranks: bounded, because objects are made for each."""

Seconds = Annotated[float, Within(0, 253_402_300_799)]
"""Seconds since the epoch, until the year 9999."""

Duration = Annotated[float, Within(-1e12, 1e12)]
"""A duration in seconds; negative if a clock was set back."""

FileName = Annotated[str, Like(r"(?!\.\.?\Z)[\w\-+.=@]{1,200}", "the name of a file")]
"""One part of a path: letters, digits, and characters without meaning to a shell or a glob."""

Digits = Annotated[str, Like(r"[0-9]{1,7}", "a rank")]


class _Misfit(Exception):
    def __init__(self, field: str, what: str) -> None:
        super().__init__(field, what)
        self.field, self.what = field, what


def _misfit(field: str, value: Any, wanted: str) -> _Misfit:
    names: Mapping[type[Any], str] = {dict: "an object", list: "a list"}
    shown = value[:_SHOWN] if isinstance(value, str) else value
    more = "…" if shown is not value else ""
    return _Misfit(field, f"is {names.get(type(value)) or repr(shown)}{more}, not {wanted}")


def read_json(kind: type[Kind], content: str | bytes, *, file: str) -> Kind:
    """Read an object from JSON.

    Args:
        kind: a dataclass or a TypedDict with annotations.

    Raises:
        DamagedFileError: the content doesn't fit the type.
    """
    try:
        value = strict_json.loads_to_show(content)
    except ValueError as error:
        raise DamagedFileError(file, "", f"isn't JSON that polytrain writes ({error})") from error
    return fitting(kind, value, file=file)


def fitting(kind: type[Kind], value: Any, *, file: str) -> Kind:
    """Convert a parsed JSON value to this type; see `read_json`."""
    try:
        read: Kind = _reader(cast(Hashable, kind))(value, "")
    except _Misfit as misfit:
        raise DamagedFileError(file, misfit.field.lstrip("."), misfit.what) from None
    return read


@cache
def _reader(hint: Any) -> _Reader:
    """Return the function that reads a value of this type, or raises `_Misfit`."""
    origin, given = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, field: value
    if origin is NotRequired:
        return _reader(given[0])
    if origin is Annotated:
        return _annotated(given[0], given[1])
    if origin in (Union, UnionType):
        return _union([_reader(each) for each in given])
    if origin is Literal:
        return _expecting(
            lambda value: isinstance(value, str) and value in given, f"one of {given}"
        )
    if origin is tuple and given[-1] is not Ellipsis:
        return _pair([_reader(each) for each in given])
    if origin in (tuple, list, Sequence):
        return _items(given[0], tuple if origin is tuple else list)
    if origin in (dict, Mapping):
        return _mapping(_reader(given[0]), _reader(given[1]))
    if is_typeddict(hint) or is_dataclass(hint):
        return _object(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    is_fitting, wanted = _PLAIN[hint]
    return _expecting(is_fitting, wanted)


_PLAIN: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    NoneType: (lambda value: value is None, "null"),
    bool: (lambda value: type(value) is bool, "true or false"),
    int: (lambda value: type(value) is int, "a whole number"),
    float: (lambda value: type(value) in (int, float), "a number"),
    str: (lambda value: type(value) is str, "text"),
}


def _expecting(is_fitting: Callable[[Any], bool], wanted: str) -> _Reader:
    def read(value: Any, field: str) -> Any:
        if not is_fitting(value):
            raise _misfit(field, value, wanted)
        return value

    return read


def _annotated(hint: Any, rule: Within | Like | Stored) -> _Reader:
    if isinstance(rule, Stored):
        read_stored, made = _reader(rule.hint), rule.made
        return lambda value, field: made(read_stored(value, field))
    read = _reader(hint)
    if isinstance(rule, Within):
        low, high = rule.low, rule.high
        return _also(read, lambda value: low <= value <= high, f"between {low} and {high}")
    matches = re.compile(rule.pattern).fullmatch
    return _also(read, lambda value: matches(value) is not None, rule.what)


def _also(read: _Reader, is_fitting: Callable[[Any], bool], wanted: str) -> _Reader:
    expect = _expecting(is_fitting, wanted)
    return lambda value, field: expect(read(value, field), field)


def _union(readers: Sequence[_Reader]) -> _Reader:
    def read(value: Any, field: str) -> Any:
        misfits = []
        for each in readers:
            try:
                return each(value, field)
            except _Misfit as misfit:
                misfits.append(misfit)
        # An error inside an object says more than that it isn't null.
        raise max(misfits, key=lambda misfit: len(misfit.field))

    return read


def _items(hint: Any, make: Callable[[list[Any]], Any]) -> _Reader:
    read_item, are_fitting = _reader(hint), _numbers(hint)

    def read(value: Any, field: str) -> Any:
        if type(value) is not list:
            raise _misfit(field, value, "a list")
        if are_fitting(value):
            return make(value)
        return make([read_item(each, f"{field}[]") for each in value])

    return read


def _numbers(hint: Any) -> Callable[[list[Any]], bool]:
    """Return a check that all of a list's numbers fit, without a call per item: a journal has
    millions. If the check fails, items are read one by one for the error."""
    if get_origin(hint) is not Annotated or get_args(hint)[0] not in (int, float):
        return lambda values: False
    kind, rule = get_args(hint)
    kinds = {int} if kind is int else {int, float}

    def are_fitting(values: list[Any]) -> bool:
        return not values or (
            {*map(type, values)} <= kinds
            # Comparisons miss NaN, so check the sum.
            and rule.low <= min(values)
            and max(values) <= rule.high
            and math.isfinite(sum(values))
        )

    return are_fitting


def _pair(readers: Sequence[_Reader]) -> _Reader:
    def read(value: Any, field: str) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _misfit(field, value, f"a list of {len(readers)}")
        return tuple(each(item, f"{field}[]") for each, item in zip(readers, value, strict=True))

    return read


def _mapping(read_key: _Reader, read_value: _Reader) -> _Reader:
    def read(value: Any, field: str) -> Any:
        if type(value) is not dict:
            raise _misfit(field, value, "an object")
        return {
            read_key(key, f"{field}'s names"): read_value(inner, f"{field}.{key[:_SHOWN]}")
            for key, inner in value.items()
        }

    return read


def _object(kind: Any) -> _Reader:
    """Return a reader. For a dataclass it rejects unknown fields; for a TypedDict it keeps them."""
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        required, others = kind.__required_keys__ - optional, True
    else:
        hints = {
            each.name: hints[each.name] for each in fields(kind) if each.init and is_stored(each)
        }
        required, others = {e.name for e in fields(kind) if _is_required(e)}, False
    readers = {name: _reader(hint) for name, hint in hints.items()}

    def read(value: Any, field: str) -> Any:
        if type(value) is not dict:
            raise _misfit(field, value, "an object")
        missing = required - value.keys()
        if missing:
            raise _Misfit(f"{field}.{min(missing)}", "is missing")
        found = {}
        for name, inner in value.items():
            known = readers.get(name)
            if known is not None:
                found[name] = known(inner, f"{field}.{name}")
            elif others:
                found[name] = inner
            else:
                raise _Misfit(f"{field}.{name[:_SHOWN]}", "is unknown")
        return found if others else kind(**found)

    return read


def is_stored(field: Any) -> bool:
    """Return whether JSON holds this field of a dataclass."""
    return bool(field.metadata.get("stored", True))


def _is_required(field: Any) -> bool:
    return field.init and field.default is MISSING and field.default_factory is MISSING


def _enum(kind: type[Enum]) -> _Reader:
    known = {each.value: each for each in kind}

    def read(value: Any, field: str) -> Any:
        if type(value) is not str or value not in known:
            raise _misfit(field, value, f"one of {', '.join(known)}")
        return known[value]

    return read
