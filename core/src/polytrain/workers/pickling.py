"""Sending a user's function to another process, wherever the user has defined it."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import Any

import cloudpickle


def pickled_with(*functions: Any, value: Any) -> bytes:
    """Pickle a value that holds functions of the user's.

    Functions of a script, a notebook or a prompt travel by value, those of modules by name. A
    module that other processes can't find by its name (a test file, one that was loaded from its
    path) travels by value too.
    """
    pickled, _ = pickled_apart(*functions, value=value, kind=())
    return pickled


def pickled_apart(
    *functions: Any, value: Any, kind: type | tuple[type, ...]
) -> tuple[bytes, list[Any]]:
    """The same, with objects of some kind left out, to travel in a way of their own.

    Returns:
        What `unpickled` takes: the pickled value, and the objects.
    """
    file = io.BytesIO()
    pickler = _Apart(file, kind)
    with contextlib.ExitStack() as stack:
        for name in {getattr(function, "__module__", None) for function in functions}:
            stack.enter_context(_by_value(name))
        pickler.dump(value)
    return file.getvalue(), pickler.apart


def unpickled(pickled: bytes, apart: Sequence[Any]) -> Any:
    """The value that `pickled_apart` was given."""
    return _Together(io.BytesIO(pickled), apart).load()


class _Together(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, apart: Sequence[Any]) -> None:
        super().__init__(file)
        self._apart = apart

    def persistent_load(self, number: int) -> Any:
        return self._apart[number]


class _Apart(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO, kind: type | tuple[type, ...]) -> None:
        super().__init__(file)
        self.apart: list[Any] = []
        self._kind = kind

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, self._kind):
            return None
        self.apart.append(value)
        return len(self.apart) - 1


def code_in(value: Any, *, depth: int = 6) -> Iterator[Any]:
    """What a value holds that a user may have written: itself, and what is in it.

    Args:
        value: a function, an object, or a container of such.
        depth: how many objects or containers deep to look.
    """
    if depth == 0:
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        yield value
        # A callback holds the function that it calls.
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from code_in(part, depth=depth - 1)


def code_of_job(function: Any, backend: Any) -> list[Any]:
    """What travels with a job that a user may have written: its function, the backend, its options.

    A callback, an objective or a model's builder comes from a script just as the function does.
    """
    return list(code_in([function, backend]))


@contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    module = sys.modules.get(name or "")
    everywhere = name == "__main__" or name in sys.builtin_module_names
    if module is None or everywhere or PathFinder.find_spec(str(name).partition(".")[0]):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
