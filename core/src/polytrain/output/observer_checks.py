"""What is wrong with an observer: hooks that would never be called, or that can't be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from polytrain.text.close_names import close_to
from polytrain_plugins import Problem
from polytrain_plugins.hookspecs import PROJECT, ObserverHooks

_FIELD = "RunConfig.observers"
_PREFIX = "polytrain_"
_MARK = f"{PROJECT}_impl"
"""What pluggy's marker, `hookimpl`, sets on a function."""


class RecordFollower:
    """An observer that gets a run's record: from a satellite, which knows it. It may lack hooks."""

    __slots__ = ()


def is_called(observer: Any) -> bool:
    """Return whether an observer is one for its hooks, and not only for the record."""
    kind = type(observer)
    marked = (hasattr(getattr(kind, name, None), _MARK) for name in dir(kind))
    return not isinstance(observer, RecordFollower) or any(marked)


def follow_record(track: Any, observers: Any) -> bool:
    """Return whether trackers or exporters follow a run.

    Args:
        track: what the user passed as `RunConfig.track`.
        observers: what the user passed as `RunConfig.observers`.
    """
    given = observers if isinstance(observers, tuple | list) else ()
    is_tracked = track is not None and track != ()
    return is_tracked or any(isinstance(each, RecordFollower) for each in given)


def observers_problems(observers: Any) -> Iterator[Problem]:
    """Yield what is wrong with a run's observers.

    Args:
        observers: what the user passed as `RunConfig.observers`.
    """
    if not isinstance(observers, tuple | list):
        yield Problem(
            field=_FIELD,
            what=f"it is a {type(observers).__name__}",
            remedy="Give a list of observers, also for one: observers=[…]",
        )
        return
    for place, observer in enumerate(observers):
        field = f"{_FIELD}[{place}]"
        if any(observer is earlier for earlier in observers[:place]):
            yield Problem(field=field, what="it is given twice", remedy="Leave one of them out")
        elif is_called(observer):
            yield from observer_problems(observer, field)


def observer_problems(observer: Any, field: str) -> Iterator[Problem]:
    """Yield what is wrong with one observer.

    Args:
        observer: any object.
        field: how it is named to the user.
    """
    if inspect.isclass(observer):
        name = observer.__name__
        yield Problem(field=field, what=f"it is the class {name}", remedy=f"Give {name}(…)")
        return
    methods = dict(_methods(observer))
    marked = {name: method for name, method in methods.items() if hasattr(method, _MARK)}
    for name in methods.keys() & _hooks().keys() - marked.keys():
        yield Problem(
            field=f"{field}.{name}",
            what="it isn't marked as a hook, and would never be called",
            remedy="Write @hookimpl above it, from `from polytrain_plugins import hookimpl`",
        )
    for name, method in marked.items():
        yield from _hook_problems(f"{field}.{name}", name, method)
    if not marked and not methods.keys() & _hooks().keys():
        yield Problem(
            field=field,
            what=f"a {type(observer).__name__} has no hook",
            remedy=f"Give it a method with @hookimpl above it: {', '.join(_hooks())}",
        )


def _hook_problems(field: str, name: str, method: Callable[..., Any]) -> Iterator[Problem]:
    hooks = _hooks()
    if name not in hooks:
        near = close_to(name, list(hooks))
        meant = f"Did you mean {near[0]!r}? " if near else ""
        yield Problem(
            field=field,
            what="there is no such hook",
            remedy=f"{meant}There are: {', '.join(hooks)}",
        )
        return
    for parameter in inspect.signature(method).parameters:
        if parameter not in hooks[name]:
            yield Problem(
                field=field,
                what=f"the hook has no argument {parameter!r}",
                remedy=f"It may take any of: {', '.join(hooks[name])}",
            )


def _hooks() -> dict[str, list[str]]:
    """The arguments of each hook, by its name."""
    specs = {k: v for k, v in vars(ObserverHooks).items() if k.startswith(_PREFIX)}
    return {name: list(inspect.signature(spec).parameters)[1:] for name, spec in specs.items()}


def _methods(observer: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(observer):
        # A property may do anything when it is read.
        if not isinstance(getattr(type(observer), name, None), property):
            method = getattr(observer, name, None)
            if inspect.isroutine(method):
                yield name, method
