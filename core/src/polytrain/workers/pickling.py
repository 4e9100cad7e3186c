"""Sending a user's function to another process, wherever the user has defined it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
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
    with contextlib.ExitStack() as stack:
        for name in {getattr(function, "__module__", None) for function in functions}:
            stack.enter_context(_by_value(name))
        pickled: bytes = cloudpickle.dumps(value)
    return pickled


@contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    module = sys.modules.get(name or "")
    if module is None or name == "__main__" or PathFinder.find_spec(str(name).partition(".")[0]):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
