"""What is a user's own code: in tracebacks, and with what it takes from modules around it. Pure."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, ParamSpec, TypeVar

import polytrain_plugins
from polytrain.data_errors import is_library
from polytrain_plugins import PolytrainError
from polytrain_plugins.installed import installed_entry_points
from polytrain_plugins.registry import GROUP

_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_FILLING = ("EXTENDED_ARG", "PUSH_NULL", "NOP")


def is_installed(file: str) -> bool:
    """Return whether a module's file belongs to the interpreter or an installed distribution."""
    return not _INSTALLED.isdisjoint(file.split(os.sep)) or file.startswith(_STANDARD)


def is_users_module(name: Any) -> bool:
    """Return whether a module is a user's: not Python's, not installed, not polytrain's.

    A script is, and so is what has no file: a notebook, or a module that was sent here.
    """
    if not isinstance(name, str) or name == "__main__":
        return True
    top = name.partition(".")[0]
    if top in _polytrains():
        return False
    for each in (name, top):
        file = _file_of(sys.modules.get(each))
        if file is not None:
            return not is_installed(os.path.abspath(file))
    return top not in sys.stdlib_module_names


def name_of_type(kind: type) -> str:
    """Return a class's name: with its module, unless that is a user's.

    A script's module has one name where it is run, and another where it is imported.
    """
    module = kind.__module__
    return kind.__qualname__ if is_users_module(module) else f"{module}.{kind.__qualname__}"


@functools.cache
def globals_of(code: CodeType) -> Mapping[str, frozenset[tuple[str, ...]]]:
    """Return the global variables that code reads, and functions inside it, and doesn't set.

    Returns:
        name → the attributes that are read of it, each as a path. An empty path is the object
        itself, for whatever use.
    """
    found: dict[str, set[tuple[str, ...]]] = {}
    set_: set[str] = set()
    for each in _codes(code):
        read, written = _names_of(each)
        set_ |= written
        for name, path in read:
            found.setdefault(name, set()).add(path)
    return {name: frozenset(paths) for name, paths in found.items() if name not in set_}


@functools.cache
def instructions_of(code: CodeType) -> tuple[tuple[Any, ...], ...]:
    """Return what a code object does, one step after another, in values that can be compared.

    An attribute that is called is read in one of two ways, depending on whether the module imports
    what has it: these are the same here.
    """
    kept = [each for each in dis.get_instructions(code) if each.opname not in _FILLING]
    offsets = [each.offset for each in kept]
    steps = [(_step_of(each.opname), _argument_of(each, offsets)) for each in kept]
    handlers = [
        (*(bisect_left(offsets, offset) for offset in each[:3]), *each[3:])
        for each in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # only newer stubs have it
    ]
    return (*steps, *handlers)


def _step_of(name: str) -> str:
    return "LOAD_ATTR" if name == "LOAD_METHOD" else name


def _argument_of(each: dis.Instruction, offsets: list[int]) -> Any:
    if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
        return bisect_left(offsets, each.argval)
    has_name = each.opcode in dis.hasname or each.opcode in dis.haslocal
    return each.argval if has_name or each.opcode in dis.hasfree else each.arg


def _names_of(code: CodeType) -> tuple[set[tuple[str, tuple[str, ...]]], set[str]]:
    """Return what one code object reads, with paths, and the global variables that it sets."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    written = {
        each.argval for each in instructions if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    # The body of a class has names of its own.
    own = {each.argval for each in instructions if each.opname == "STORE_NAME"}
    read: set[tuple[str, tuple[str, ...]]] = set()
    for number, each in enumerate(instructions):
        if each.opname not in _READS or each.argval in own:
            continue
        path: list[str] = []
        for following in instructions[number + 1 :]:
            if following.opname not in _ATTRIBUTES:
                break
            path.append(following.argval)
        read.add((each.argval, tuple(path)))
    return read, written


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@functools.cache
def _polytrains() -> frozenset[str]:
    """Return polytrain's packages and those of the backends, which may run from a checkout."""
    backends = (each.value.partition(":")[0] for each in installed_entry_points(GROUP))
    names = (each.partition(".")[0] for each in backends)
    return frozenset({"polytrain", "polytrain_plugins", *names})


def _file_of(module: ModuleType | None) -> str | None:
    # Read `__dict__` directly: some modules import others on attribute access.
    held = getattr(module, "__dict__", {})
    file = held.get("__file__")
    if isinstance(file, str):
        return file
    # A directory without an __init__.py.
    return next((each for each in held.get("__path__", ()) if isinstance(each, str)), None)


P = ParamSpec("P")
R = TypeVar("R")

_OURS = tuple(
    f"{directory}{os.sep}"
    for directory in (Path(__file__).parents[1], Path(polytrain_plugins.__file__).parent)
)


def user_frames_only(function: Callable[P, R]) -> Callable[P, R]:
    """Take polytrain's frames out of the traceback of what leaves a function on purpose.

    That is an interruption, or an error whose text says what is wrong.
    """

    @wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except (KeyboardInterrupt, SystemExit, PolytrainError) as error:
            error.__traceback__ = _of_user(error.__traceback__)
            # Without a name: to raise by name would put this frame back.
            raise

    return called


def users_traceback(error: BaseException) -> str:
    """Return what Python prints of an exception, without polytrain's frames before the user's."""
    frames = _of_user(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _of_user(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback with the user's frames and those of the libraries that they call."""
    kept: list[TracebackType] = []
    is_users = False
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        # Libraries that polytrain calls are as little the user's as polytrain is.
        is_users = not file.startswith(_OURS) and (is_users or not is_library(file))
        if is_users:
            kept.append(frames)
        frames = frames.tb_next
    shown = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
