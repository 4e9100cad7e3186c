"""Problems that backends of any framework look for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.errors import Problem
from polytrain_plugins.type_names import quoted


def options_beside_function(backend: Any, names: Iterable[str]) -> Iterator[Problem]:
    """Yield the options of declarative training that are set beside a training function.

    Args:
        backend: the backend, a dataclass.
        names: its options that only declarative training uses.
    """
    for option in fields(backend):
        default = (
            option.default_factory() if option.default_factory is not MISSING else option.default
        )
        if option.name in names and getattr(backend, option.name) != default:
            yield Problem(
                field=option.name,
                what="it is for training without a training function, and there is one",
                remedy="Use it inside the function, or leave the function out",
            )


def needed_without_function(backend: Any, **remedies: str) -> Iterator[Problem]:
    """Options that declarative training can't do without, and that are None.

    Args:
        backend: whose options these are.
        remedies: an option's name to what to do.
    """
    for option, remedy in remedies.items():
        if getattr(backend, option) is None:
            yield Problem(field=option, what="it is required", remedy=remedy)


MOST_SECONDS = 1e9
"""About 30 years, as a limit of timeouts. Clocks and frameworks overflow at a few hundred years."""


def timeout_problems(**options: Any) -> Iterator[Problem]:
    """Yield the options that aren't a number of seconds above 0, or are longer than any run.

    Args:
        options: an option's name to what the user gave.
    """
    for option, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MOST_SECONDS:
            yield Problem(
                field=option,
                what=f"{quoted(value)} is not a number of seconds",
                remedy=f"Give a number of seconds above 0 and at most {MOST_SECONDS:g}",
            )


def unknown_name(field: str, name: str, known: Iterable[str], whose: str) -> Iterator[Problem]:
    """Yield a problem if a framework doesn't know a name.

    Args:
        field: the argument, as the user writes it.
        name: what the user gave.
        known: the names that the framework knows.
        whose: what these names are, for the message.
    """
    names = sorted(known)
    if name not in names:
        yield Problem(
            field=field,
            what=f"{name!r} isn't one of {whose}",
            remedy=f"{did_you_mean(name, names)}There are: {', '.join(names)}",
        )


def is_instance_of(value: Any, package: str, name: str) -> bool:
    """Whether a value is an instance of a package's class, without importing the package."""
    classes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return (package, name) in classes
