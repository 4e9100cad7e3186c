"""The arguments that a training function is called with: a dict, or an object of its own type."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from polytrain_plugins import Problem
from polytrain_plugins.type_names import a_type


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
    """Return the name by which a user knows a function, or another object of theirs."""
    return str(getattr(function, "__name__", type(function).__name__))


def written(function: Any) -> str:
    """Return a function with its parameters as text, such as `train(config, *, rate=0.1)`.

    Annotations are left out.
    """
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    return f"{name_of(function)}{shown}"


_VALUES = (str, bytes, int, float, complex, list, tuple, set, frozenset)
"""What a value of a config is, and no config."""

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def by_name(config: Any) -> Mapping[str, Any] | None:
    """Return the values of a config by name; None if it is no config.

    A config is a dict or an object with fields: a dataclass, a named tuple, a model of pydantic or
    attrs, what argparse returns, or an object of an ordinary class with attributes.
    """
    values = _fields(config)
    if values is not None:
        return values
    if isinstance(config, (type, ModuleType, *_VALUES)) or callable(config):
        return None
    held = {
        name: value
        for cls in reversed(type(config).__mro__)
        for name, value in vars(cls).items()
        if isinstance(value, _VALUES)
    }
    held |= getattr(config, "__dict__", {})
    return {name: value for name, value in held.items() if not name.startswith("_")} or None


def recorded(config: Any) -> Any:
    """Return a config as dicts all the way down, whose values can be written and compared."""
    values = by_name(config)
    return config if values is None else {name: _recorded(each) for name, each in values.items()}


def config_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem if a training function can't be called with this."""
    try:
        recorded(config)
    except RecursionError:
        yield Problem(
            field="train_loop_config",
            what="it is nested in far too many levels, or a dict or a list in it contains itself",
            remedy="Pass plain values, and make such objects in the training function",
        )
        return
    if config is not None and by_name(config) is None:
        call = f": {config.__name__}()" if isinstance(config, type) else ""
        yield Problem(
            field="train_loop_config",
            what=f"it is {a_type(config)}",
            remedy=f"Pass a dict, or an object with fields such as a dataclass{call}",
        )


def call_problems(function: Any, config: Any) -> Iterator[Problem]:
    """Yield a problem if a training function can't be called with a config, or isn't meant to be.

    The config is the first argument, whatever the name of its parameter. But a parameter with the
    name of one of the config's values, or with a number or a text as its default, says that the
    function expects the values one by one.
    """
    name = name_of(function)
    what, remedy = None, f"Let it take one, def {name}(config), or leave train_loop_config out"
    if config is None:
        if not accepts(function):
            what = "needs more than one argument, and gets at most train_loop_config"
            remedy = f"Take them as one, def {name}(config), and pass train_loop_config={{…}}"
    elif not accepts(function, config) and not parameters_of(function):
        what = "takes no argument, and gets train_loop_config"
    else:
        wrong = _misread(function, by_name(config) or {})
        if wrong is not None or not accepts(function, config):
            what = f"is called with one argument, the whole train_loop_config{wrong or ''}"
            values = "config" if isinstance(config, Mapping) else "vars(config)"
            remedy = f"Write def {name}(config), or pass lambda config: {name}(**{values})"
    if what is not None:
        what = f"{written(function)} {what}"
        yield Problem(field="train_loop_per_worker", what=what, remedy=remedy)


def _misread(function: Any, values: Mapping[str, Any]) -> str | None:
    """Return which parameter gets something else than its author means; None if none does."""
    parameters = [each for each in parameters_of(function) if each.kind in _BY_PLACE]
    for place, parameter in enumerate(parameters):
        if parameter.name in values:
            # A config may have a value `config`; but then that isn't a number.
            is_alone = len(parameters) == 1 and parameter.default is inspect.Parameter.empty
            is_meant = not is_alone or isinstance(values[parameter.name], int | float)
        else:
            is_meant = place == 0 and isinstance(parameter.default, _VALUES)
        if is_meant:
            gets = "which would be its" if place == 0 else "and would get nothing as"
            return f", {gets} {parameter.name!r}"
    return None


def _fields(value: Any) -> Mapping[str, Any] | None:
    """Return the values of an object that exists to hold them; None if it is another."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "_asdict"):  # a named tuple
        return dict(value._asdict())
    if hasattr(value, "__attrs_attrs__"):
        return {each.name: getattr(value, each.name) for each in value.__attrs_attrs__}
    if isinstance(value, argparse.Namespace | SimpleNamespace) or hasattr(value, "model_dump"):
        return dict(vars(value))
    return None


def _recorded(value: Any) -> Any:
    # Any other object is itself: it may be large, and refer to itself.
    values = _fields(value)
    if values is not None:
        return {name: _recorded(each) for name, each in values.items()}
    return type(value)(map(_recorded, value)) if type(value) in (list, tuple) else value
