"""What a training function carries to the workers: what can't be sent, and what is too large."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from polytrain_plugins import Problem

_MOST_BYTES = 256 * 2**20
"""Each worker process gets the function anew with each attempt."""


def pickle_problems(field: str, value: Any) -> Iterator[Problem]:
    """Yield a problem if a function or a config can't be sent to the workers.

    Args:
        field: the argument, as the user writes it.
        value: a function, or a mapping.
    """
    size = _size_or_error(value)
    if isinstance(size, Exception):
        culprits = "; ".join(_culprits(value)) or f"{type(size).__name__}: {size}"
        yield Problem(
            field=field,
            what=f"it can't be sent to the workers: {culprits}",
            remedy="Create such objects inside the training function",
        )
    elif size > _MOST_BYTES:
        largest = _largest(value)
        because = f", of which {largest[0]!r} has {largest[1] >> 20}" if largest else ""
        yield Problem(
            field=field,
            what=f"it has {size >> 20} MiB when it is pickled{because}; at most "
            f"{_MOST_BYTES >> 20} are sent to each worker",
            remedy="Pass data as datasets={…}, or load it inside the training function",
        )


def _size_or_error(value: Any) -> int | Exception:
    """The bytes of a pickled object, or why it can't be pickled."""
    try:
        return len(cloudpickle.dumps(value))
    except Exception as error:  # whatever an object's own __reduce__ raises
        return error


def _culprits(value: Any) -> Iterator[str]:
    """The variables that a function uses, or the entries of a config, that can't be pickled."""
    for name, content in _contents(value).items():
        error = _size_or_error(content)
        if isinstance(error, Exception):
            yield f"{name!r} is a {type(content).__name__} ({error})"


def _largest(value: Any) -> tuple[str, int] | None:
    """The largest variable or entry, and its bytes; None if none is known."""
    sizes = ((name, _size_or_error(content)) for name, content in _contents(value).items())
    known = [(name, size) for name, size in sizes if isinstance(size, int)]
    return max(known, key=lambda item: item[1], default=None)


def _contents(value: Any) -> dict[str, Any]:
    """The variables that a function uses, or the entries of a config, by name."""
    if isinstance(value, Mapping):
        return {str(name): content for name, content in value.items()}
    if not inspect.isfunction(function := inspect.unwrap(value)):
        return {}
    found = inspect.getclosurevars(function)
    return {**found.globals, **_globals_of_inner(function), **found.nonlocals}


def _globals_of_inner(function: FunctionType) -> dict[str, Any]:
    """The global variables that functions use which are defined inside a function."""
    known = function.__globals__
    inner = [each for each in function.__code__.co_consts if isinstance(each, CodeType)]
    found: dict[str, Any] = {}
    while inner:
        code = inner.pop()
        inner += [each for each in code.co_consts if isinstance(each, CodeType)]
        found.update({name: known[name] for name in code.co_names if name in known})
    return found
