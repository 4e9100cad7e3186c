"""Proves that a training loop carries nothing from step to step outside of its `TrainingState`.

A restarted function begins again: its code, the restored parts, and the place in its data have to
bring it to the point where it was. A counter or a sum in a local variable would be lost, and the
training would go on wrongly. So the variables that the rest of the loop reads are compared with
those of the attempt's first step: they have to be the same, or to be in the saved progress.
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import random
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from polytrain_torch.private import version_of

_WORKER_PROCESS = "polytrain.workers.session.worker_process"

_OURS = ("polytrain", "polytrain_plugins", "polytrain_torch")
_TRANSPARENT = (*_OURS, "torch", "contextlib", "functools", "tqdm")
"""Packages whose frames, between the loop and its data, carry nothing that training reads."""

_SHOWN_ONLY = ("tqdm", "logging", "tensorboard", "wandb", "mlflow", "rich")
"""Packages whose objects show the training, and don't change it."""

_MOST_ITEMS = 256
"""Longer containers are data: only their length is compared."""

_MOST_NODES = 20_000
_DEEPEST = 6
_PLAIN = (type(None), bool, int, float, complex, str, bytes)

Frames = tuple[tuple[FrameType, int], ...]
"""The frames from a data loader's caller outwards, each with its last instruction."""


def frames_from(frame: FrameType | None) -> Frames:
    """Return the frames of the training function and what it has called, innermost first."""
    found = []
    while frame is not None and frame.f_globals.get("__name__") != _WORKER_PROCESS:
        found.append((frame, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


@dataclass
class Loop:
    """The variables of a training loop at the attempt's first step."""

    frames: Frames
    known: Collection[int]
    """Ids of the objects that checkpoints hold, or that rebuild themselves."""

    _first: Mapping[tuple[str, str], Any] = field(init=False)

    def __post_init__(self) -> None:
        self._first = self._variables(self.frames, has_batch=True)

    def carried(
        self, frames: Frames, progress: Mapping[str, Any], *, has_batch: bool
    ) -> str | None:
        """Return what keeps a restart from going on at a clean point; None if nothing does.

        Args:
            frames: the frames at the point.
            progress: the progress that `TrainingState.restore` would return.
            has_batch: whether a batch came next; otherwise the epoch was over.
        """
        library = _library(frames)
        if library is not None:
            return f"its loop is in {library}, whose counters aren't known"
        if [(frame.f_code, at) for frame, at in frames] != [
            (frame.f_code, at) for frame, at in self.frames
        ]:
            return "it trains in several places"
        for (name, where), value in self._variables(frames, has_batch=has_batch).items():
            if value == self._first.get((name, where)):
                continue
            # A restart that begins its loop with the saved number sets the variable to it.
            saved = progress.values() if where == _TARGET else [progress.get(name)]
            if value[0] is int and any(type(each) is int and each == value[1] for each in saved):
                continue
            return f"its variable {name!r} changes from step to step, and isn't in TrainingState"
        return None

    def _variables(self, frames: Frames, *, has_batch: bool) -> dict[tuple[str, str], Any]:
        """Return what the values look like that the code after these points reads.

        Each has a name, and the place of the variable.
        """
        found: dict[tuple[str, str], Any] = {}
        looks = _Looks(self.known)
        for depth, (frame, at) in enumerate(frames):
            if _package(frame) in _TRANSPARENT:
                continue
            inner = depth == 0 or all(_package(each) in _TRANSPARENT for each, _ in frames[:depth])
            names = read_after(frame.f_code, at, is_over=inner and not has_batch)
            values = frame.f_locals
            for name in sorted(names):
                if name in values:
                    found[name, str(depth)] = looks.at(values[name])
            for name in sorted(targets_around(frame.f_code, at)):
                if isinstance(values.get(name), _PLAIN):
                    found.pop((name, str(depth)), None)
                    found[name, _TARGET] = looks.at(values[name])
            for name in _globals_of(frame.f_code):
                if name in frame.f_globals:
                    found[name, "module"] = looks.at(frame.f_globals[name])
        return found


_TARGET = "for"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _library(frames: Frames) -> str | None:
    """Return the installed package that a frame belongs to; None if all are the user's."""
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    for frame, _ in frames:
        package = _package(frame)
        if package not in _TRANSPARENT and frame.f_code.co_filename.startswith(tuple(installed)):
            return package
    return None


@functools.cache
def read_after(code: CodeType, at: int, *, is_over: bool = False) -> frozenset[str]:
    """Return the local variables that code reads after an instruction, before it sets them.

    Args:
        code: a function's code.
        at: the instruction's offset: a call, or a `for` that gets its next item.
        is_over: whether the `for` gets none.
    """
    instructions = list(dis.get_instructions(code))
    number_of = {each.offset: number for number, each in enumerate(instructions)}
    following = [_following(each, number, number_of) for number, each in enumerate(instructions)]
    for begin, end, handler, *_ in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]  # only newer stubs have it
        for offset in range(begin, end, 2):
            if offset in number_of:
                following[number_of[offset]].add(number_of[handler])
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    has_changed = True
    while has_changed:
        has_changed = False
        for number in reversed(range(len(instructions))):
            after = frozenset[str]().union(*(live[each] for each in following[number]))
            reads, writes = _uses(instructions[number])
            now = reads | (after - writes)
            if now != live[number]:
                live[number], has_changed = now, True
    number = max(number for offset, number in number_of.items() if offset <= at)
    nexts = following[number]
    if instructions[number].opname == "FOR_ITER":
        exit_ = number_of[instructions[number].argval]
        nexts = {exit_} if is_over else nexts - {exit_}
    # Closures may read theirs at any time.
    return frozenset[str]().union(code.co_cellvars, code.co_freevars, *(live[n] for n in nexts))


@functools.cache
def targets_around(code: CodeType, at: int) -> frozenset[str]:
    """Return the variables of the `for` loops around an instruction that their code reads."""
    instructions = list(dis.get_instructions(code))
    read = frozenset[str]().union(*(_uses(each)[0] for each in instructions))
    found: set[str] = set()
    for number, each in enumerate(instructions):
        if each.opname != "FOR_ITER" or not each.offset <= at < each.argval:
            continue
        for other in instructions[number + 1 :]:
            if not other.opname.startswith(("STORE_FAST", "UNPACK", "STORE_DEREF", "CACHE")):
                break
            found |= _uses(other)[1]
    return read.intersection(found)


def _following(each: dis.Instruction, number: int, number_of: Mapping[int, int]) -> set[int]:
    name = each.opname
    found: set[int] = set()
    if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
        found.add(number_of[each.argval])
    if name == "RETURN_GENERATOR" or not name.startswith(
        ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
    ):
        found.add(number + 1)
    return {one for one in found if one < len(number_of)}


def _uses(each: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Return the local variables that an instruction reads, and those that it sets."""
    name = each.opname
    if "FAST" not in name and "DEREF" not in name:
        return frozenset(), frozenset()
    names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - {names[0]}, frozenset(names[:1])
    if name.startswith(("STORE", "DELETE")):
        return frozenset(), frozenset(names)
    return frozenset(names), frozenset()


def _globals_of(code: CodeType) -> Iterator[str]:
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            yield each.argval


class _Looks:
    """What values look like: equal looks mean that nothing has changed in them."""

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._nodes = 0
        self._seen: set[int] = set()

    def at(self, value: Any, depth: int = 0) -> Any:
        """Return a value's look."""
        self._nodes += 1
        kind = type(value)
        if isinstance(value, _PLAIN):
            return kind, value
        if id(value) in self._known or id(value) in self._seen or depth > _DEEPEST:
            return kind, "seen"
        if self._nodes > _MOST_NODES:
            return kind, "more"
        package = (kind.__module__ or "").partition(".")[0]
        if package in _OURS or package in _SHOWN_ONLY or "tensorboard" in (kind.__module__ or ""):
            return kind, "shown"
        self._seen.add(id(value))
        return (kind, *self._inside(value, depth + 1))

    def _inside(self, value: Any, depth: int) -> tuple[Any, ...]:
        match value:
            case torch.Tensor():
                return (id(value), version_of(value))
            case np.ndarray():
                large = value.nbytes > 1 << 16
                return (value.shape, value.ctypes.data if large else value.tobytes())
            case torch.Generator():
                return (value.get_state().numpy().tobytes(),)
            case np.random.Generator():
                return (repr(value.bit_generator.state),)
            case np.random.RandomState():
                return (repr(value.get_state()),)
            case random.Random():
                return (value.getstate(),)
            case list() | tuple() | set() | frozenset():
                few = value if len(value) <= _MOST_ITEMS else ()
                return (len(value), *(self.at(each, depth) for each in few))
            case Mapping():
                pairs = value.items() if len(value) <= _MOST_ITEMS else ()
                return (len(value), *((str(key), self.at(each, depth)) for key, each in pairs))
            case FunctionType():
                cells = [each.cell_contents for each in value.__closure__ or () if _is_full(each)]
                named = [
                    value.__globals__[name]
                    for name in _globals_of(value.__code__)
                    if name in value.__globals__
                ]
                return tuple(self.at(each, depth) for each in (*cells, *named))
            case MethodType() | BuiltinFunctionType():
                return (self.at(value.__self__, depth),)
            case functools.partial():
                return tuple(
                    self.at(each, depth) for each in (value.func, value.args, value.keywords)
                )
            case ModuleType() | type() | torch.utils.data.DataLoader() | logging.Logger():
                return ()
            case io.IOBase():
                return ()
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> tuple[Any, ...]:
        package = type(value).__module__.partition(".")[0]
        if package in ("builtins", "itertools", "collections") and not hasattr(value, "__dict__"):
            # Iterators count where they are.
            try:
                return tuple(self.at(each, depth) for each in value.__reduce__())
            except TypeError:
                return ()
        state = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    state[name] = getattr(value, name)
        return tuple((name, self.at(each, depth)) for name, each in state.items())


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # it raises if it is empty
    except ValueError:
        return False
    return True
