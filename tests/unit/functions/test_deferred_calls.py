"""A function whose call trains nothing, because it makes a coroutine or a generator, is refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from polytrain import InvalidJobError, make_trainer
from polytrain.functions.function_checks import deferred_kind, deferred_value_kind


async def coroutine(config: Any = None) -> None: ...


def generator(config: Any = None) -> Iterator[int]:
    yield 1


async def async_generator(config: Any = None) -> AsyncIterator[int]:
    yield 1


def plain(config: Any = None) -> None: ...


class Callables:
    async def __call__(self, config: Any = None) -> None: ...

    def generator(self, config: Any = None) -> Iterator[int]:
        yield 1

    @staticmethod
    async def static(config: Any = None) -> None: ...


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def running(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return wrapper


def looping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for _ in function(*args, **kwargs):
            pass

    return wrapper


DEFERRED = {
    "coroutine function": (coroutine, "a coroutine"),
    "generator function": (generator, "a generator"),
    "asynchronous generator": (async_generator, "an asynchronous generator"),
    "partial": (functools.partial(coroutine, 1), "a coroutine"),
    "partial of partial": (functools.partial(functools.partial(generator), 1), "a generator"),
    "callable object": (Callables(), "a coroutine"),
    "partial of an object": (functools.partial(Callables(), 1), "a coroutine"),
    "method": (Callables().generator, "a generator"),
    "static method": (Callables.static, "a coroutine"),
    "decorated": (passing_on(coroutine), "a coroutine"),
    "decorated twice": (passing_on(passing_on(generator)), "a generator"),
    "decorated object": (passing_on(Callables()), "a coroutine"),
    "partial of a decorated one": (functools.partial(passing_on(coroutine), 1), "a coroutine"),
    "context manager": (contextlib.contextmanager(generator), "a generator"),
}


@pytest.mark.parametrize(("function", "kind"), DEFERRED.values(), ids=DEFERRED)
def test_a_training_function_that_would_not_run_is_refused(
    function: Callable[..., Any], kind: str
) -> None:
    with pytest.raises(InvalidJobError, match=f"makes {kind} and trains nothing.*plain function"):
        make_trainer("reference", function)


@pytest.mark.parametrize(
    "function",
    [
        plain,
        functools.partial(plain, 1),
        passing_on(plain),
        Callables,
        running(coroutine),
        passing_on(running(coroutine)),
        looping(generator),
        print,
    ],
)
def test_a_function_that_runs_is_not_refused(function: Callable[..., Any]) -> None:
    assert deferred_kind(function) is None


def test_what_a_wrapper_returns_unawaited_is_recognized() -> None:
    unawaited = coroutine()
    assert deferred_value_kind(unawaited) == "a coroutine"
    unawaited.close()
    assert deferred_value_kind(generator()) == "a generator"
    assert deferred_value_kind(async_generator()) == "an asynchronous generator"


@pytest.mark.parametrize("value", [None, 3, [1], iter([1]), (each for each in [1])])
def test_other_values_are_kept(value: Any) -> None:
    assert deferred_value_kind(value) is None
