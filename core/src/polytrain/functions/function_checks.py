"""Finds functions that can't be sent to workers, or whose call doesn't run their code."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from polytrain.config.loop_config import name_of
from polytrain.functions.pickling import code_in, dumps, pickled_for_ray
from polytrain_plugins import Problem
from polytrain_plugins.type_names import a_type

_MOST_BYTES = 256 * 2**20
"""Maximum bytes of a function, which each worker process gets anew with each attempt."""


def pickle_problems(
    field: str,
    value: Any,
    *,
    remedy: str = "Create such objects inside the training function",
    any_size: bool = False,
) -> Iterator[Problem]:
    """Yield a problem if a function, a config or a backend can't be sent to the workers.

    Args:
        field: the argument, as the user writes it.
        remedy: advice for objects that can't be sent.
        any_size: whether it may be large, such as a backend with a model to continue.
    """
    size = _size_or_error(value)
    if isinstance(size, Exception):
        culprits = "; ".join(_culprits(field, value)) or f"{type(size).__name__}: {size}"
        yield Problem(
            field=field,
            what=f"it can't be sent to the workers: {culprits}",
            remedy=remedy,
        )
    elif size > _MOST_BYTES and not any_size:
        largest = _largest(value)
        because = f", of which {largest[0]!r} has {largest[1] >> 20}" if largest else ""
        yield Problem(
            field=field,
            what=f"it has {size >> 20} MiB when it is pickled{because}; at most "
            f"{_MOST_BYTES >> 20} are sent to each worker",
            remedy="Pass data as datasets={…}, or load it inside the training function",
        )


def reference_problems(field: str, value: Any, *, process: str, remedy: str) -> Iterator[Problem]:
    """Yield a problem if a value holds objects of Ray that a process without Ray can't get.

    Args:
        field: the argument, as the user writes it.
        value: a function, or a mapping that can be pickled.
    """
    if "ray" not in sys.modules:
        # Then this process has no Ray objects; don't pickle a value that may be large.
        return
    _, references = pickled_for_ray(*code_in(value), value=value)
    if references:
        yield Problem(
            field=field,
            what="it names data in Ray's memory, such as a data set of ray.data.from_items(), "
            f"and {process} isn't connected to Ray",
            remedy=remedy,
        )


def _size_or_error(value: Any) -> int | Exception:
    """Return the size of a pickled object, in bytes, or the error of pickling it."""
    try:
        return len(dumps(value))
    except Exception as error:  # an object's __reduce__ may raise anything
        return error


def _culprits(path: str, value: Any, *, depth: int = 8) -> Iterator[str]:
    """Yield the paths of the innermost objects in a value that can't be pickled.

    Args:
        path: the value, as the user writes it.
        value: a function, a container or an object that can't be pickled.
        depth: maximum number of steps into it.
    """
    for inner, content in _parts(path, value):
        error = _size_or_error(content)
        if isinstance(error, Exception):
            found = list(_culprits(inner, content, depth=depth - 1)) if depth > 1 else []
            yield from found or [f"`{inner}` is {a_type(content)} ({error})"]


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its path."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", content) for key, content in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{place}]", content) for place, content in enumerate(value))
    elif isinstance(value, partial):
        yield from _parts(path, value.func)
        yield from _parts(f"{path}.args", value.args)
        yield from _parts(f"{path}.keywords", value.keywords)
    elif isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__
    elif inspect.isfunction(value):
        yield from {**_contents(value), **_defaults(value)}.items()
    elif not isinstance(value, type):
        held = getattr(value, "__dict__", {})
        yield from ((f"{path}.{name}", content) for name, content in held.items())


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the default values of a function's parameters, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    by_place = dict(zip(names[len(names) - len(values) :], values, strict=True))
    return {**by_place, **(function.__kwdefaults__ or {})}


def _largest(value: Any) -> tuple[str, int] | None:
    """Return the largest variable or entry, and its size in bytes; None if none is known."""
    sizes = ((name, _size_or_error(content)) for name, content in _contents(value).items())
    known = [(name, size) for name, size in sizes if isinstance(size, int)]
    return max(known, key=lambda item: item[1], default=None)


def _contents(value: Any) -> dict[str, Any]:
    """Return the variables that a function uses, or the entries of a config, by name."""
    if isinstance(value, Mapping):
        return {str(name): content for name, content in value.items()}
    if not inspect.isfunction(function := inspect.unwrap(value)):
        return {}
    found = inspect.getclosurevars(function)
    return {**found.globals, **_globals_of_inner(function), **found.nonlocals}


def _globals_of_inner(function: FunctionType) -> dict[str, Any]:
    """Return the global variables that a function's inner functions use."""
    known = function.__globals__
    inner = [each for each in function.__code__.co_consts if isinstance(each, CodeType)]
    found: dict[str, Any] = {}
    while inner:
        code = inner.pop()
        inner += [each for each in code.co_consts if isinstance(each, CodeType)]
        found.update({name: known[name] for name in code.co_names if name in known})
    return found


_RUN_COROUTINES = frozenset({"run", "run_until_complete", "run_coroutine_threadsafe", "run_sync"})
"""Names with which a wrapper runs a coroutine, in asyncio, trio or anyio."""

_RUN_GENERATORS = frozenset({"deque", "list", "next", "send", "tuple"})
"""Names with which a wrapper runs a generator, besides loops."""

_COROUTINE, _GENERATOR, _ASYNC_GENERATOR = "a coroutine", "a generator", "an asynchronous generator"

PLAIN_INSTEAD = {
    _COROUTINE: "Pass a plain function; in it, asyncio.run(…) runs a coroutine",
    _GENERATOR: "Pass a plain function, without yield",
    _ASYNC_GENERATOR: "Pass a plain function, without async and yield",
}
"""The remedy for each kind, as a sentence without its full stop."""


def deferred_problems(field: str, function: Any, *, effect: str) -> Iterator[Problem]:
    """Yield a problem if a call makes an object instead of running the function.

    Args:
        field: the argument, as the user writes it.
        effect: what that leads to, as the end of a sentence.
    """
    deferred = deferred_kind(function)
    if deferred is not None:
        yield Problem(
            field=field,
            what=f"calling {name_of(function)} makes {deferred} {effect}",
            remedy=PLAIN_INSTEAD[deferred],
        )


def deferred_kind(function: Callable[..., Any]) -> str | None:
    """Return the kind of object that a call makes instead of running the function; None if it runs.

    Inspects partial objects, methods, callable objects and, if `functools.wraps` has kept it, the
    function behind a wrapper that neither runs nor loops over its result.

    Returns:
        A key of `PLAIN_INSTEAD`.
    """
    for each in _layers(function):
        if inspect.iscoroutinefunction(each):
            return _COROUTINE
        if inspect.isasyncgenfunction(each):
            return _ASYNC_GENERATOR
        if inspect.isgeneratorfunction(each):
            return _GENERATOR
    return None


def deferred_value_kind(value: Any) -> str | None:
    """Return the kind of a deferred call's result; None if the value is something else."""
    if inspect.iscoroutine(value):
        return _COROUTINE
    if inspect.isasyncgen(value):
        return _ASYNC_GENERATOR
    # A function may want to return a generator expression.
    if inspect.isgenerator(value) and value.__name__ != "<genexpr>":
        return _GENERATOR
    return None


def _layers(function: Any) -> Iterator[Any]:
    """Yield a callable and the callables that it calls, from the outside in."""
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif isinstance(function, FunctionType):
            inner = getattr(function, "__wrapped__", None)
            if inner is None or _runs_its_result(function.__code__):
                return
            function = inner
        elif not isinstance(function, type):
            function = type(function).__call__


def _runs_its_result(code: CodeType) -> bool:
    """Return whether a wrapper may run the coroutine, or loop over the generator, that it gets."""
    names = {*code.co_names, *code.co_freevars}
    return (
        bool(names & (_RUN_COROUTINES | _RUN_GENERATORS))
        or any(each.opname == "FOR_ITER" for each in dis.get_instructions(code))
        or any(_runs_its_result(each) for each in code.co_consts if isinstance(each, CodeType))
    )
