"""Inspects the signatures of users' functions."""

from __future__ import annotations

import inspect
from typing import Any


def accepts(function: Any, *arguments: Any) -> bool:
    """Return whether it can be called with these arguments; True if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables in C have no signature
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def parameters_of(function: Any) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function; none if its signature is unknown."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables in C have no signature
        return ()


def name_of(function: Any) -> str:
    """Return the name by which a user knows a function."""
    return str(getattr(function, "__name__", type(function).__name__))


def written(function: Any) -> str:
    """Return a function with its parameters as text, such as `train(config, *, rate=0.1)`.

    Annotations are left out.
    """
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    return f"{name_of(function)}{shown}"
