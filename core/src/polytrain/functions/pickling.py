"""Pickles users' functions for other processes, no matter where they are defined.

The code keeps the name of its file, and its lines.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import CodeType
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle a value. `pickle.loads` reads it.

    Raises:
        Exception: it can't be pickled. An object's methods may raise anything.
    """
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


_CACHED = type(functools.lru_cache(dumps))


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # noqa: TID251  # it has no types
    """A `cloudpickle.Pickler` whose code objects keep `co_filename`.

    Since 3.1.3 cloudpickle writes "<dynamic-code>" there. Tracebacks, stacks and readers of a
    function's source (`tf.function`, `torch.jit.script`) then find neither file nor line.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Use one string for all code of a file: pickle writes the same object only once.
        self._sources: dict[str, str | None] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _CACHED) and _is_by_value(value):
            # It would name itself, in a module that other processes don't have.
            return restored_cache, (value.__wrapped__, value.cache_parameters())
        if type(value) is functools.cached_property:
            # Until Python 3.12 it has a lock.
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        if not isinstance(value, CodeType):
            return super().reducer_override(value)
        make, arguments = self.dispatch_table[CodeType](value)
        file = value.co_filename
        if file not in self._sources:
            self._sources[file] = _source_only_here(file)
        return restored_code, (make, arguments, file, self._sources[file])


def restored_code(
    make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str, source: str | None
) -> CodeType:
    """Return a code object with the name of its file; pickles call this.

    Args:
        make: a function that returns the code object.
        arguments: the arguments of `make`.
        file: the file's name.
        source: the source, if the process that pickled the code had no such file.
    """
    if source is not None:
        # Without a modification time, `linecache` never compares the entry with a file.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return make(*arguments).replace(co_filename=file)


def restored_cache(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return a function of `functools.cache` or `lru_cache`, without results; pickles call this."""
    return functools.lru_cache(**parameters)(function)


def _is_by_value(function: Any) -> bool:
    """Return whether other processes can't import a function by its name."""
    name = function.__module__
    return (
        name == "__main__"
        or name in cloudpickle.list_registry_pickle_by_value()
        or "<locals>" in function.__qualname__
    )


def _source_only_here(file: str) -> str | None:
    """Return the source of a notebook's cell, or of code that was typed at a prompt."""
    return None if os.path.exists(file) else "".join(linecache.getlines(file)) or None


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


_registering = threading.Lock()
_users_of: Counter[str | None] = Counter()
"""Module that is pickled by value for now → how many pickle it. Others are by the user's wish."""


@contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    module = sys.modules.get(name or "")
    everywhere = name == "__main__" or name in sys.builtin_module_names
    if module is None or everywhere or PathFinder.find_spec(str(name).partition(".")[0]):
        yield
        return
    # Cloudpickle knows one list of modules for all threads, each of which may train.
    with _registering:
        is_ours = name in _users_of or name not in cloudpickle.list_registry_pickle_by_value()
        if is_ours:
            _users_of[name] += 1
            cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with _registering:
            if is_ours:
                _users_of[name] -= 1
            if is_ours and not _users_of[name]:
                del _users_of[name]
                cloudpickle.unregister_pickle_by_value(module)


THIS_MACHINE = "127.0.0.1"
"""The address of workers that run on the driver's machine, without Ray."""

_REMEDY = (
    "install it on that node, or copy it there beside the script; or submit the script's folder, "
    "which Ray copies to every node: ray job submit --working-dir . -- python SCRIPT"
)


def note_unreadable(error: BaseException, what: str, host: str) -> None:
    """Add a note to the error of unpickling.

    Args:
        what: what couldn't be unpickled, as the subject of a sentence.
        host: the address of the process's node.
    """
    if host == THIS_MACHINE:
        error.add_note(
            f"{what} could not be read in the worker process. Modules that it uses must be "
            "installed, or lie beside the script."
        )
    elif isinstance(error, ModuleNotFoundError):
        error.add_note(
            f"{what} could not be read on {host}, which doesn't have the module {error.name!r}: "
            f"{_REMEDY}."
        )
    else:
        error.add_note(f"{what} could not be read on {host}.")


def note_missing_module(error: BaseException, host: str) -> None:
    """Add a note to an exception of an engine or a function that imports what its node lacks.

    Args:
        host: the address of the rank's node. It isn't named: equal errors of all ranks, which are
            a bug, must have equal messages.
    """
    if isinstance(error, ModuleNotFoundError) and host != THIS_MACHINE:
        error.add_note(
            f"If other nodes have the module {error.name!r}, this rank's lacks it: {_REMEDY}."
        )
