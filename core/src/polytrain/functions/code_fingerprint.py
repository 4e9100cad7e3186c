"""Fingerprints of users' functions: functions that behave differently have different ones.

A fingerprint covers the bytecode with its constants, defaults and closures, and what it reads of
its module: functions, classes and values of the user's own, also those of the user's other modules.
Values count by their content, which is what pickle would store of them. What is installed counts by
its name. It ignores line numbers, docstrings, the order of dicts and sets, and the name of the
module: the same script may be run, or imported. Pure.
"""

from __future__ import annotations

import hashlib
import inspect
import marshal
import platform
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from polytrain.functions.object_contents import NotStored, attributes_of, content_of
from polytrain.functions.users_code import (
    globals_of,
    instructions_of,
    is_users_module,
    name_of_type,
)

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

_SHORT = 64
"""Bytes up to which a part isn't hashed on its own."""

_GROWING = frozenset({("append",), ("appendleft",), ("extend",), ("add",)})

_COUNTED = ("__annotations__", "__pydantic_fields__", "__slots__")
"""Special attributes of a class that say what its objects are."""


def code_fingerprint(function: Any) -> str:
    """Return the fingerprint of a function, a callable object or any other value."""
    return hashlib.sha256(_look_at(function).digest).hexdigest()


def python_version() -> str:
    """Return the Python version. Fingerprints of different versions differ with the bytecode."""
    return ".".join(platform.python_version_tuple()[:2])


class _Look(NamedTuple):
    digest: bytes

    is_whole: bool = True
    """Whether everything in it could be looked into."""


_Visit = Generator[Any, _Look, _Look]
"""Looks at one object: yields those that it holds, gets the look of each, returns its own."""


def _look_at(value: Any) -> _Look:
    """Look at a value and all that it holds, each once.

    Without recursion: lists may be nested thousands deep.
    """
    known: dict[int, tuple[Any, _Look]] = {}
    """Identity → the object, which keeps its identity from others, and its look."""
    open_: dict[int, int] = {}
    """Identity → place on the stack."""
    stack: list[tuple[Any, _Visit]] = []
    look = _plain(value)
    if look is None:
        stack.append((value, _visit(value)))
        open_[id(value)] = 0
    while stack:
        held, visit = stack[-1]
        try:
            inner = visit.send(look)  # type: ignore[arg-type]  # None begins a visit
        except StopIteration as end:
            look = end.value
            stack.pop()
            del open_[id(held)]
            known[id(held)] = held, end.value
            continue
        look = _plain(inner)
        if look is not None:
            continue
        if id(inner) in known:
            look = known[id(inner)][1]
        elif id(inner) in open_:
            look = _Look(b"around %d" % (len(stack) - open_[id(inner)]))
        else:
            open_[id(inner)] = len(stack)
            stack.append((inner, _visit(inner)))
    assert look is not None, "a visit returns a look"
    return look


def _plain(value: Any) -> _Look | None:
    """Look at a plain value, or a list of such; None if it is another."""
    kind = type(value)
    if kind is str:
        return _joined("str", value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _joined("bytes", value)
    if kind in _PLAIN:
        # The decimal digits of a long number are refused.
        return _joined(kind.__name__, hex(value) if kind is int else repr(value))
    if (kind is list or kind is tuple) and _PLAIN.issuperset(map(type, value)):
        # In this version of its format, no shared object makes a difference.
        return _joined("plain", marshal.dumps(value, 2))
    return None


def _joined(*parts: str | bytes | _Look) -> _Look:
    """Return the look of something that has these parts."""
    texts = [
        part.digest if isinstance(part, _Look) else part.encode() if isinstance(part, str) else part
        for part in parts
    ]
    # With their lengths: no two lists of parts make the same text.
    text = b"".join(b"%d %b" % (len(each), each) for each in texts)
    is_whole = all(part.is_whole for part in parts if isinstance(part, _Look))
    return _Look(text if len(text) <= _SHORT else hashlib.sha256(text).digest(), is_whole)


def _visit(value: Any) -> _Visit:
    # Not isinstance: what stands for another object claims that one's class.
    kind = type(value)
    if issubclass(kind, FunctionType):
        return _visit_function(value)
    if issubclass(kind, type):
        return _visit_class(value)
    if issubclass(kind, ModuleType):
        return _visit_module(value, {()})
    if kind in (list, tuple):
        return _visit_all(kind.__name__, value)
    if kind in (set, frozenset):
        return _visit_set(value)
    if kind is dict:
        return _visit_dict(value)
    if issubclass(kind, CodeType):
        return _visit_all("code", (), *_parts_of_code(value))
    if issubclass(kind, _PartOfModule):
        return _visit_module(value.module, value.paths)
    inner = _of_wrapper(value)
    return _visit_object(value) if inner is None else _visit_all(name_of_type(kind), inner)


def _of_wrapper(value: Any) -> tuple[Any, ...] | None:
    """Return what stands in an object that makes something of functions; None if it is another."""
    kind = type(value)
    if issubclass(kind, MethodType):
        return value.__func__, value.__self__
    if issubclass(kind, partial):
        return value.func, value.args, value.keywords
    if issubclass(kind, staticmethod | classmethod):
        return (value.__func__,)
    if issubclass(kind, property):
        return value.fget, value.fset, value.fdel
    if issubclass(kind, cached_property):
        return (value.func,)
    if issubclass(kind, BuiltinFunctionType):
        of, name = value.__self__, f"{value.__module__}.{value.__qualname__}"
        return (name,) if isinstance(of, ModuleType) else (name, of)
    # `functools.cache`, and compilers: what else they hold comes and goes.
    held = {} if is_users_module(kind.__module__) else attributes_of(value)
    return (held["__wrapped__"],) if "__wrapped__" in held else None


def _visit_all(name: str, values: Iterable[Any], *parts: str | bytes) -> _Visit:
    looks = []
    for each in values:
        looks.append((yield each))
    return _joined(name, *parts, *looks)


def _visit_set(values: Iterable[Any]) -> _Visit:
    looks = []
    # In an order that is the same in each process.
    for each in sorted(values, key=_name):
        looks.append((yield each))
    return _joined("set", *sorted(looks))


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _visit_dict(values: Mapping[Any, Any]) -> _Visit:
    keys = []
    for key in values:
        keys.append(((yield key), key))
    parts: list[_Look] = []
    for look, key in sorted(keys, key=lambda each: each[0]):
        parts += [look, (yield values[key])]
    return _joined("dict", *parts)


def _visit_function(function: FunctionType) -> _Visit:
    known = function.__globals__
    cells = [_content(cell) for cell in function.__closure__ or ()]
    if not is_users_module(known.get("__name__")):
        name = f"{function.__module__}.{function.__qualname__}"
        look = yield from _visit_all("installed function", cells, name)
        return _Look(look.digest)
    code = function.__code__
    held = [function.__defaults__, function.__kwdefaults__, *cells]
    for name, paths in sorted(globals_of(code).items()):
        if name in known and not _is_special(name) and not _fills(known[name], paths):
            held += [name, _read(known[name], paths)]
    look = yield from _visit_all("function", held, *_parts_of_code(code))
    # Whether a library's object can be sent doesn't depend on the functions that it names.
    return _Look(look.digest)


class _PartOfModule(NamedTuple):
    """A user's module, of which only some attributes are read."""

    module: ModuleType
    paths: frozenset[tuple[str, ...]]


def _read(value: Any, paths: frozenset[tuple[str, ...]]) -> Any:
    """Return what code reads that reads these attributes of a value."""
    is_part = isinstance(value, ModuleType) and () not in paths
    return _PartOfModule(value, paths) if is_part else value


def _fills(value: Any, paths: AbstractSet[tuple[str, ...]]) -> bool:
    """Return whether code adds to a list or a set: that is a state, as what it sets itself."""
    return type(value) in (list, set, deque) and not _GROWING.isdisjoint(paths)


def _visit_module(module: ModuleType, paths: Iterable[tuple[str, ...]]) -> _Visit:
    known = vars(module)
    if not is_users_module(known.get("__name__")):
        return _joined("module", str(known.get("__name__")))
    below: dict[str, set[tuple[str, ...]]] = {}
    for path in paths:
        # It is handed on as a whole: anything may be read of it.
        for name in path[:1] or tuple(known):
            below.setdefault(name, set()).add(path[1:])
    parts: list[str | _Look] = []
    for name in sorted(below):
        if name not in known or _is_special(name):
            continue
        if not _fills(known[name], below[name]):
            parts += [name, (yield _read(known[name], frozenset(below[name])))]
    return _Look(_joined("users module", *parts).digest)


def _visit_class(kind: type) -> _Visit:
    if not is_users_module(kind.__module__):
        return _joined("class", name_of_type(kind))
    held: list[Any] = [*kind.__bases__, type(kind)]
    for name, member in sorted(vars(kind).items()):
        is_code = isinstance(member, FunctionType | staticmethod | classmethod | property)
        if is_code or name in _COUNTED or not _is_special(name):
            held += [name, member]
    look = yield from _visit_all("class", held, kind.__qualname__)
    return _Look(look.digest)


def _visit_object(value: Any) -> _Visit:
    kind = type(value)
    name, is_users = name_of_type(kind), is_users_module(kind.__module__)
    try:
        look = yield from _visit_all(name, (kind, *content_of(value)))
    except NotStored as error:
        look = yield from _visit_all(name, (kind, *error.held) if is_users else ())
        return _Look(look.digest, is_whole=False)
    if look.is_whole or is_users:
        return look
    # Such as a progress bar, or a connection: the rest of it is a state that comes and goes.
    return _Look(_joined(name).digest, is_whole=False)


def _parts_of_code(code: CodeType) -> Iterator[str | bytes]:
    yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
    yield repr(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    yield repr((code.co_varnames, code.co_freevars, code.co_cellvars))
    yield repr(instructions_of(code))
    for constant in _without_docstring(code):
        if isinstance(constant, CodeType):
            yield from _parts_of_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _without_docstring(code: CodeType) -> tuple[Any, ...]:
    is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_consts
    has_one = is_function and _has_docstring(code)
    return (None, *code.co_consts[1:]) if has_one else code.co_consts


def _has_docstring(code: CodeType) -> bool:
    if sys.version_info >= (3, 14):
        return bool(code.co_flags & inspect.CO_HAS_DOCSTRING)
    # A generator expression has no place for one.
    return not code.co_name.startswith("<") and isinstance(code.co_consts[0], str)


def _is_special(name: Any) -> bool:
    """Whether a variable isn't the user's, such as `__name__`, which is another in a script."""
    return not isinstance(name, str) or (name.startswith("__") and name.endswith("__"))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
