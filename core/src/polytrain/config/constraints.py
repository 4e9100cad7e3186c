"""What a field of a configuration takes, stated at the field, and what is wrong with its value.

A field whose type is a choice (`Literal`, `bool`, None) is checked by its type alone. A number says
what it counts: `Annotated[int, Whole(...)]`, `Annotated[float, Seconds(...)]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from polytrain.text.plain_values import is_whole
from polytrain_plugins import Problem
from polytrain_plugins.problems import MOST_SECONDS


class Constraint(Protocol):
    """What the value of a field must be."""

    def wrong(self, value: Any) -> tuple[str, str] | None:
        """What is wrong with a value, and the remedy; None if nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number."""

    of: str = ""
    """What is counted, in the plural; empty where it isn't a count."""

    least: int
    most: int | None = None
    remedy: str

    def wrong(self, value: Any) -> tuple[str, str] | None:
        is_in_range = is_whole(value) and value >= self.least
        if is_in_range and (self.most is None or value <= self.most):
            return None
        wanted = f"a number of {self.of}" if self.of else "a whole number that can be kept"
        return f"{value!r} is not {wanted}", self.remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A length of time."""

    least: float = 0.0
    above: bool = False
    """Whether it must be greater than the least."""

    or_none: str = ""
    """What None stands for, where it may be given."""

    def wrong(self, value: Any) -> tuple[str, str] | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        at_least = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        or_none = f", or None {self.or_none}" if self.or_none else ""
        remedy = f"Give a number of seconds, {at_least}{or_none}"
        if not is_number or math.isnan(value):
            return f"{value!r} is not a number of seconds", remedy
        if value > MOST_SECONDS:
            limits = f"{at_least} and at most {MOST_SECONDS:g}"
            return f"{value!r} is too long", f"Give a number of seconds, {limits}{or_none}"
        if value < self.least or (self.above and value == self.least):
            return f"{value!r} is too short", remedy
        return None


def field_problems(config: Any, name: str | None = None) -> Iterator[Problem]:
    """Values that a configuration's fields don't take.

    Args:
        config: a dataclass.
        name: how it is named to the user; by its class if omitted.
    """
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        value = getattr(config, field.name)
        hint = hints[field.name]
        constraints: list[Constraint] = []
        if get_origin(hint) is Annotated:
            hint, *constraints = get_args(hint)
        if value is None and NoneType in get_args(hint):
            continue
        wrong = [found for each in constraints if (found := each.wrong(value)) is not None]
        choices = _choices(hint)
        if choices and not any(type(value) is type(each) and value == each for each in choices):
            given = [*choices, None] if NoneType in get_args(hint) else choices
            wrong.append((f"{value!r} is unknown", f"Give {' or '.join(map(repr, given))}"))
        for what, remedy in wrong:
            field_name = f"{name or type(config).__name__}.{field.name}"
            yield Problem(field=field_name, what=what, remedy=remedy)


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
    return Problem(field=field, what=f"it is a {name}", remedy=f"Pass a {wanted.__name__}")


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
