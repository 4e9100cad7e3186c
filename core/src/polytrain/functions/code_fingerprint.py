"""Fingerprints of users' functions: functions that behave differently have different ones.

A fingerprint covers the bytecode with its constants, defaults and closures, and the functions and
plain values of its module that it names. It ignores line numbers. Pure.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeGuard

_LONG = 1 << 16
"""Bytes from which a value is hashed, and not formatted as text."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def code_fingerprint(function: Any) -> str:
    """Return the fingerprint of a function or a callable object."""
    digest = hashlib.sha256()
    for part in _parts(function, seen=set()):
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()


def python_version() -> str:
    """Return the Python version. Fingerprints of different versions differ with the bytecode."""
    return ".".join(platform.python_version_tuple()[:2])


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        yield from _parts_of_function(value, seen)
    elif isinstance(value, MethodType):
        yield from _parts(value.__func__, seen)
        yield from _parts(value.__self__, seen)
    elif isinstance(value, partial):
        for inner in (value.func, value.args, value.keywords):
            yield from _parts(inner, seen)
    elif isinstance(value, _PLAIN):
        # Small numbers are shared objects, so their identity means nothing.
        seen.discard(id(value))
        # Hash long bytes, such as weights: their text is three times as long, and takes seconds.
        yield f"bytes {hashlib.sha256(value).hexdigest()}" if _is_long(value) else repr(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _parts(inner, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(repr(inner) for inner in value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield repr(key)
            yield from _parts(inner, seen)
    else:
        yield from _parts_of_object(value, seen)


def _parts_of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    code = function.__code__
    yield from _parts_of_code(code)
    yield from _parts(function.__defaults__, seen)
    yield from _parts(function.__kwdefaults__, seen)
    for cell in function.__closure__ or ():
        yield from _parts(_content(cell), seen)
    for name in sorted(_names_in(code)):
        named = function.__globals__.get(name)
        is_ours = getattr(named, "__module__", None) == function.__module__
        if isinstance(named, _PLAIN) or (isinstance(named, FunctionType | type) and is_ours):
            yield name
            yield from _parts(named, seen)


def _parts_of_code(code: CodeType) -> Iterator[str]:
    yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _parts_of_object(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the parts of a class with its methods, or of an object's class and plain values."""
    kind = value if isinstance(value, type) else type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, BuiltinFunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
    for name, member in sorted(vars(kind).items()):
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            yield name
            yield from _parts(function, seen)
    if value is kind:
        return
    for name, held in sorted(getattr(value, "__dict__", {}).items()):
        if isinstance(held, (*_PLAIN, FunctionType)):
            yield name
            yield from _parts(held, seen)


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_long(value: Any) -> TypeGuard[bytes]:
    return isinstance(value, bytes) and len(value) > _LONG


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
