"""Calls take Ray Train's arguments: in its order, and with a sentence for those that are absent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar

from polytrain_plugins import InvalidJobError, Problem
from polytrain_plugins.close_names import did_you_mean

logger = logging.getLogger(__name__)

AnyClass = TypeVar("AnyClass", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """An argument that only Ray Train has."""

    default: Any = None
    """Ray Train's; this value changes nothing, and is accepted."""

    instead: str
    """What to use instead, as a sentence."""

    is_harmless: bool = False
    """Whether any value is accepted, with a warning, because training is the same without it."""


def takes_ray_arguments(
    order: tuple[str, ...], absent: Mapping[str, Absent]
) -> Callable[[AnyClass], AnyClass]:
    """A decorator for a dataclass whose fields are given by name.

    Args:
        order: Ray Train's arguments in their order, for calls without names.
        absent: those that aren't fields.
    """

    def decorate(cls: AnyClass) -> AnyClass:
        own_init = cls.__init__  # type: ignore[misc]  # of the class itself, not of an instance
        known = {field.name for field in fields(cls)}

        @wraps(own_init)
        def __init__(self: Any, *given: Any, **named: Any) -> None:
            values = {**dict(zip(order, given, strict=False)), **named}
            problems = [*_form_problems(cls.__name__, order, given, named)]
            for name in [name for name in values if name not in known]:
                problems += _problems(cls.__name__, name, values.pop(name), absent, known)
            if problems:
                raise InvalidJobError(tuple(problems))
            own_init(self, **values)

        cls.__init__ = __init__  # type: ignore[misc]  # the same
        return cls

    return decorate


def _form_problems(
    cls: str, order: tuple[str, ...], given: tuple[Any, ...], named: Mapping[str, Any]
) -> Iterator[Problem]:
    if len(given) > len(order):
        yield Problem(
            field=cls,
            what=f"{len(given)} values without names are more than it takes",
            remedy=f"The order is: {', '.join(order)}",
        )
    for name in [name for name in order[: len(given)] if name in named]:
        yield Problem(field=f"{cls}.{name}", what="it is given twice", remedy="Give it by name")


def _problems(
    cls: str, name: str, value: Any, absent: Mapping[str, Absent], known: set[str]
) -> Iterator[Problem]:
    found = absent.get(name)
    if found is None:
        remedy = f"{did_you_mean(name, sorted(known))}It has: {', '.join(sorted(known))}"
        yield Problem(field=f"{cls}.{name}", what="there is no such field", remedy=remedy)
    elif value is None or value == found.default or (not value and not found.default):
        return
    elif found.is_harmless:
        logger.warning("%s.%s isn't used. %s.", cls, name, found.instead)
    else:
        what = f"polytrain has no counterpart of this argument of Ray Train; it is {value!r}"
        yield Problem(field=f"{cls}.{name}", what=what, remedy=found.instead)
