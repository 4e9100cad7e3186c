"""Pickles users' functions for other processes, no matter where they are defined."""

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

from polytrain.functions.pickler import Pickler, dumps


def pickled_with(*functions: Any, value: Any) -> bytes:
    """Pickle a value that holds users' functions.

    Functions of a script, a notebook or a prompt are pickled by value, those of modules by name. A
    module that other processes can't import by its name (a test file, or one that was loaded from
    its path) is pickled by value too.
    """
    pickled, _ = pickled_apart(*functions, value=value, kind=())
    return pickled


def pickled_apart(
    *functions: Any, value: Any, kind: type | tuple[type, ...]
) -> tuple[bytes, list[Any]]:
    """Pickle like `pickled_with`, but leave out objects of some types, to be sent separately.

    Returns:
        The arguments of `unpickled`: the pickled value, and the objects.
    """
    file = io.BytesIO()
    pickler = _Apart(file, kind)
    with contextlib.ExitStack() as stack:
        for name in {getattr(function, "__module__", None) for function in functions}:
            stack.enter_context(_by_value(name))
        pickler.dump(value)
    return file.getvalue(), pickler.apart


def unpickled(pickled: bytes, apart: Sequence[Any]) -> Any:
    """Return the value that `pickled_apart` pickled."""
    return _Together(io.BytesIO(pickled), apart).load()


class _Together(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, apart: Sequence[Any]) -> None:
        super().__init__(file)
        self._apart = apart

    def persistent_load(self, number: int) -> Any:
        return self._apart[number]


class _Apart(Pickler):
    def __init__(self, file: io.BytesIO, kind: type | tuple[type, ...]) -> None:
        super().__init__(file)
        self.apart: list[Any] = []
        self._kind = kind

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, self._kind):
            return None
        self.apart.append(value)
        return len(self.apart) - 1


def pickled_for_ray(*functions: Any, value: Any) -> tuple[bytes, list[Any]]:
    """Pickle like `pickled_apart`, with references to Ray's objects sent separately.

    Ray itself must send them, to count the references to an object and keep it. An in-memory data
    set of Ray Data consists of such references.
    """
    # If Ray isn't imported there are no references, so don't import it here.
    reference = getattr(sys.modules.get("ray"), "ObjectRef", ())
    return pickled_apart(*functions, value=value, kind=reference)


def pickled_error(error: BaseException) -> bytes | None:
    """Return a pickled exception; None if it can't be pickled."""
    try:
        return dumps(error)
    except Exception:  # an exception may hold any object; its text is sent anyway
        return None


def code_in(value: Any, *, depth: int = 6) -> Iterator[Any]:
    """Yield the objects in a value that may be user code, including the value itself.

    Args:
        value: a function, an object, or a container of them.
        depth: maximum depth of nested objects and containers.
    """
    if depth == 0:
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        yield value
        # For example, a callback holds the function that it calls.
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from code_in(part, depth=depth - 1)


def code_of_job(*parts: Any) -> list[Any]:
    """Return a job's objects that may be user code: its functions, backend and options.

    Callbacks, objectives and model builders may come from a script like the function.
    """
    return list(code_in(parts))


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
