"""Finds functions whose call only makes a coroutine or a generator, without running their code."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

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
