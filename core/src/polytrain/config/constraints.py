"""What the value of a field must be, stated at the field and checked in one place.

A type says most of it: a class, a `Literal`, `bool`, a configuration within another. The rest is
stated beside the type, and then decides alone: `Annotated[int, Whole(...)]`,
`Annotated[float, Seconds(...)]`, `Annotated[str, Checked(function)]`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from polytrain.text.described import ShortRepr, is_whole, plain
from polytrain_plugins import Problem
from polytrain_plugins.problems import MOST_SECONDS
from polytrain_plugins.type_names import a_type, quoted, with_article

Wrong = tuple[str, str]
"""What is wrong with a value, and the remedy."""


class Constraint(Protocol):
    """What the value of a field must be."""

    def wrong(self, value: Any) -> Iterable[Wrong]:
        """Return what is wrong with a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number."""

    of: str = ""
    """What is counted, in the plural; empty where it isn't a count."""

    least: int
    most: int | None = None
    remedy: str

    def wrong(self, value: Any) -> Iterator[Wrong]:
        is_in_range = is_whole(value) and value >= self.least
        if not is_in_range or (self.most is not None and value > self.most):
            wanted = f"a number of {self.of}" if self.of else "a whole number that can be kept"
            yield f"{quoted(value)} is not {wanted}", self.remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A length of time."""

    least: float = 0.0
    above: bool = False
    """Whether it must be greater than the least."""

    or_none: str = ""
    """What None stands for, where it may be given."""

    def wrong(self, value: Any) -> Iterator[Wrong]:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        at_least = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        or_none = f", or None {self.or_none}" if self.or_none else ""
        remedy = f"Give a number of seconds, {at_least}{or_none}"
        # NaN is unequal to itself; `isnan` would fail for a whole number that no float can hold.
        if not is_number or value != value:
            yield f"{quoted(value)} is not a number of seconds", remedy
        elif value > MOST_SECONDS:
            limits = f"{at_least} and at most {MOST_SECONDS:g}"
            yield f"{quoted(value)} is too long", f"Give a number of seconds, {limits}{or_none}"
        elif value < self.least or (self.above and value == self.least):
            yield f"{quoted(value)} is too short", remedy


@dataclass(frozen=True, slots=True)
class Function:
    """Something to call."""

    remedy: str

    def wrong(self, value: Any) -> Iterator[Wrong]:
        if not callable(value):
            yield f"{quoted(value)} is not callable", self.remedy


@dataclass(frozen=True, slots=True)
class Checked:
    """A value with rules of its own."""

    wrong: Callable[[Any], Iterable[Wrong]]


@dataclass(frozen=True, slots=True)
class Entries:
    """A dict whose entries have rules."""

    check: Callable[[Mapping[Any, Any]], Iterable[Wrong]]

    def wrong(self, value: Any) -> Iterator[Wrong]:
        if isinstance(value, Mapping):
            yield from self.check(value)
        else:
            yield f"it is {a_type(value)}", "Pass a dict"


class Config(ShortRepr):
    """A configuration, a dataclass whose fields state what they take.

    It takes NumPy's numbers and arrays for numbers and lists, 0 and 1 for truth values, and None
    for a default that is made anew each time, as Ray Train does.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # all that derive from it are dataclasses
            value = plain(getattr(self, each.name))
            if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
                value = value.tolist()
            if value is None and each.default_factory is not MISSING:
                value = each.default_factory()
            elif each.type == "bool" and type(value) is int and value in (0, 1):
                value = bool(value)
            object.__setattr__(self, each.name, value)


def field_problems(config: Any, name: str | None = None) -> Iterator[Problem]:
    """Yield the values that fields of a configuration, and of those in it, can't take.

    Args:
        config: a dataclass.
        name: how its fields are named to the user; if empty they stand alone, and if omitted a
            configuration is named by its class, wherever it is.
    """
    cls: Any = type(config)
    prefix = cls.__name__ if name is None else name
    for field, hint in _hints(cls).items():
        value, path = getattr(config, field), f"{prefix}.{field}" if prefix else field
        constraints: Iterable[Constraint] = ()
        if get_origin(hint) is Annotated:
            hint, *constraints = get_args(hint)
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if value is None and NoneType in members:
            continue
        if constraints:
            for constraint in constraints:
                for what, remedy in constraint.wrong(value):
                    yield Problem(field=path, what=what, remedy=remedy)
        elif (wanted := _classes(hint)) and not isinstance(value, wanted):
            yield wrong_type(path, value, _SHOWN.get(wanted[0], wanted[0]))
        elif isinstance(value, Config):
            yield from field_problems(value, None if name is None else path)
        elif (choices := _choices(hint)) and not _is_one_of(value, choices):
            given = [*choices, None] if NoneType in members else choices
            remedy = f"Give {' or '.join(map(repr, given))}"
            wrong = "neither True nor False" if choices == [True, False] else "unknown"
            yield Problem(field=path, what=f"{quoted(value)} is {wrong}", remedy=remedy)


def _is_one_of(value: Any, choices: list[Any]) -> bool:
    # 0 and 1 are truth values only where nothing else may be given.
    types = {bool, int} if choices == [True, False] else {type(value)}
    return any(type(each) in types and type(value) in types and value == each for each in choices)


def typed_problems(field: str, value: Any, wanted: type) -> Iterator[Problem]:
    """Yield a problem if an argument is no configuration of a class, or those of its fields."""
    if isinstance(value, wanted):
        yield from field_problems(value)
    else:
        yield wrong_type(field, value, wanted)


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    """The fields of a dataclass, each with its type and its constraints."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


_SHOWN: Mapping[type, type] = {Mapping: dict}
"""An abstract class → the one that a message asks for."""


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes of which a value is one; empty if it may be anything, or has rules elsewhere."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    classes = tuple(get_origin(each) or each for each in members if each is not NoneType)
    if classes == (str, Path):
        return classes
    [first, *others] = classes
    is_plain = first in (str, Mapping) or (isinstance(first, type) and issubclass(first, Config))
    return (first,) if is_plain and not others else ()


_OF_FRAMEWORKS = {
    "TorchConfig": "polytrain.torch",
    "XGBoostConfig": "polytrain.xgboost",
    "LightGBMConfig": "polytrain.lightgbm",
    "TensorflowConfig": "polytrain.tensorflow",
}
"""Names of Ray Train's and of ours, with our modules."""


def wrong_type(field: str, value: Any, wanted: type) -> Problem:
    """A value of another type than its field takes."""
    name, package = type(value).__name__, type(value).__module__
    if package.startswith("ray.") and name in (wanted.__name__, "DataConfig", *_OF_FRAMEWORKS):
        home = _OF_FRAMEWORKS.get(name, "polytrain")
        return Problem(
            field=field,
            what=f"it is ray.train's {name}",
            remedy=f"Import polytrain's: from {home} import {name}",
        )
    return Problem(field=field, what=f"it is {a_type(value)}", remedy=_instead(value, wanted))


def _instead(value: Any, wanted: type) -> str:
    """Return what to pass; of a dict's entries the names alone, as values may be secret."""
    name = wanted.__name__
    if isinstance(value, type) and issubclass(value, wanted):
        return f"Pass {value.__name__}(…)"
    cls: Any = wanted
    known = _hints(cls) if isinstance(value, Mapping) and issubclass(wanted, Config) else ()
    names = ", ".join(f"{each}=…" for each in known if each in value)
    call = f": {name}({names})" if names else ""
    return f"Pass {with_article(name)}{call}"


def _choices(hint: Any) -> list[Any]:
    """All values that a type allows besides None; empty if these can't be listed."""
    if hint is bool:
        return [True, False]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        listed = [_choices(each) for each in get_args(hint) if each is not NoneType]
        return [choice for choices in listed for choice in choices] if all(listed) else []
    return []


_NAME_BYTES = 255
"""Length of a file's name that every usual file system takes."""

_SHOWN_OF_NAME = 80
"""Characters of a wrong value that tell the user which one it is."""

_RAYS = ("CPU", "GPU", "TPU", "HPU", "NPU", "neuron_cores", "memory")
"""Resources that Ray has by itself; others have the names that the cluster's owner gives them."""

_MOST_RESOURCES = 2.0**63
"""Of any resource: bytes of memory are the smallest unit."""

_OF_ITS_STORE = "object_store_memory"

_LEAST_AMOUNT = 0.0001
"""The unit in which Ray counts resources."""

_FOLDED = {name.casefold().replace("_", "").rstrip("s"): name for name in _RAYS}


def worker_count(count: Any) -> Iterator[Wrong]:
    """Yield what is wrong with a number of workers, or with the least and the most."""
    if isinstance(count, tuple | list):
        least, most = count if len(count) == 2 else (0, 0)
        is_pair = isinstance(count, tuple) and is_whole(least) and is_whole(most)
        if not is_pair or not 1 <= least <= most:
            yield (
                f"{quoted(count)} is not a pair of the least and the most workers",
                "Give two numbers, the smaller first, for example (2, 8)",
            )
    elif not is_whole(count) or count < 0:
        yield (
            f"{quoted(count)} is not a number of workers",
            "Give a whole number: 1 or more, or 0 to train in this process; or the least "
            "and the most, for example (2, 8)",
        )


def resource_amounts(given: Mapping[Any, Any]) -> Iterator[Wrong]:
    """Yield what is wrong with the resources of a worker."""
    for name, amount in given.items():
        if not isinstance(amount, int | float) or not 0 <= amount <= _MOST_RESOURCES:
            yield (
                f"{quoted(amount)} is not an amount of {name!r}",
                'Give a number, 0 or more, for example {"CPU": 2}',
            )
        elif 0 < amount < _LEAST_AMOUNT:
            yield f"Ray has no amount as small as {amount} {name}", f"Give 0 or {_LEAST_AMOUNT:g}"
        elif name in ("GPU", "NPU") and amount > 1 and amount % 1:
            yield f"Ray gives no worker {amount} {name}s", "Give a part of one, or a whole number"
        if name == _OF_ITS_STORE:
            # A node's daemon dies of a placement group with it.
            yield f"Ray reserves no {name} for workers", "Leave it out"
        meant = _FOLDED.get(str(name).casefold().replace("_", "").rstrip("s"))
        if meant is not None and name != meant:
            yield f"Ray has no resource {name!r}", f"Write {meant!r}"


def node_labels(given: Any) -> Iterator[Wrong]:
    """Yield what is wrong with a label selector, or with a list of them."""
    selectors = [given] if isinstance(given, Mapping) else given
    if not isinstance(selectors, list | tuple):
        yield f"it is {a_type(given)}", "Pass a dict"
        return
    for selector in selectors:
        if not isinstance(selector, Mapping) or not all(
            isinstance(text, str) and text for pair in selector.items() for text in pair
        ):
            yield (
                f"{selector!r} doesn't map names of labels to values, as strings",
                'Give a dict, for example {"ray.io/market-type": "spot"}',
            )


def directory_name(name: Any) -> Iterator[Wrong]:
    """Yield why a run's name can't be that of its directory."""
    remedy = None
    if not isinstance(name, str) or name in ("", ".", ".."):
        remedy = 'Give a name, for example "baseline"'
    elif name != Path(name).name:
        remedy = "Give a name without slashes"
    elif not name.isprintable():
        remedy = "Give a name without control characters"
    elif len(os.fsencode(name)) > _NAME_BYTES:
        remedy = f"Give a name of at most {_NAME_BYTES} bytes"
    if remedy is not None:
        text = repr(name)
        shown = (
            text
            if len(text) <= _SHOWN_OF_NAME
            else f"{text[: _SHOWN_OF_NAME // 2]}…{text[-_SHOWN_OF_NAME // 4 :]}"
        )
        yield f"{shown} can't name a directory", remedy


def path_or_address(given: Any) -> Iterator[Wrong]:
    """Yield why this can't be a path or an address, wherever it would lead."""
    if not isinstance(given, str | Path):
        yield f"it is {a_type(given)}", "Pass a path or an address"
    elif str(given) == "":
        yield "'' is empty", "Give a path or an address"
    elif "\0" in str(given):
        yield (
            f"{str(given)!r} holds a NUL character, which no file's path can",
            "Give a path or an address without it",
        )
    elif str(given).startswith("~") and os.path.expanduser(given).startswith("~"):
        yield f"{str(given)!r} is below a home directory that isn't known", "Give its whole path"


def storage_place(given: Any) -> Iterator[Wrong]:
    """Yield why this can't be a path or an address of a storage."""
    yield from path_or_address(given)
    is_address = isinstance(given, str) and "://" in given and not given.startswith("file://")
    if is_address and not {".", ".."}.isdisjoint(given.split("/")):
        # Clients of object storage shorten it in some requests, and not in others.
        yield f"{given!r} has '.' or '..' as a part", "Write out which address is meant"


def working_directory() -> Iterator[Wrong]:
    """Yield that this process's working directory is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        yield "the working directory was deleted", "Change to a directory that exists"


def metric_name(name: Any) -> Iterator[Wrong]:
    """Yield why a metric can't have this name."""
    if not isinstance(name, str) or name == "":
        yield (
            f"{quoted(name)} is not the name of a metric",
            'Give the name of a reported metric, for example "loss", or None',
        )


def copies(given: Any) -> Iterator[Wrong]:
    """Yield why this isn't how often a state is copied."""
    if given is not None and given != "auto" and not (is_whole(given) and given >= 1):
        remedy = 'Give 1 or more, "auto" for at most 3 % of the time, or None for no copies'
        yield f"{quoted(given)} is not a number of steps", remedy


def divergence_rules(given: Any) -> Iterator[Wrong]:
    """Yield why these aren't metrics to watch, spikes, or a function."""
    if isinstance(given, Mapping):
        names: list[Any] = list(given)
        for name, times in given.items():
            is_number = isinstance(times, int | float) and not isinstance(times, bool)
            if not is_number or not 1 < times <= sys.float_info.max:
                yield (
                    f"{name!r}: {quoted(times)} is not a multiple of a metric's usual value",
                    'Give a number above 1, for example {"loss": 4}',
                )
    elif isinstance(given, str | list | tuple):
        names = [given] if isinstance(given, str) else list(given)
    elif callable(given) and not isinstance(given, type):
        return
    else:
        yield (
            f"{quoted(given)} is neither a metric nor a function",
            'Give names, for example "loss", or {"loss": 4}, or a function of the last reports',
        )
        return
    if not names:
        yield "it names no metric", 'Give a name, for example "loss", or None for all metrics'
    for name in names:
        yield from metric_name(name)


def column_names(names: Any) -> Iterator[Wrong]:
    """Yield why this isn't a list of columns."""
    if isinstance(names, str):
        yield f"{names!r} is one name", f"Give a list: [{names!r}]"
    elif not isinstance(names, Iterable):
        yield f"{quoted(names)} is not a list of columns", 'Give their names, such as ["x", "y"]'
