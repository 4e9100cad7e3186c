"""What can be reached from variables, as it was at one time, to compare it with a later time.

Objects are equal if they hold the same, so a list that is made again each time is no change. What
is compared by its identity isn't kept alive: it may be large, and on a GPU.
What lies nearest is looked at first and whole, small things before large ones: what a loop adds up
is small beside its data.
"""

from __future__ import annotations

import array
import contextvars
import functools
import hashlib
import inspect
import io
import logging
import marshal
import math
import queue
import random
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from polytrain.extension import is_installed
from polytrain_torch.checkpoints.rank_parts import digest
from polytrain_torch.private import original_module, version_of
from polytrain_torch.survivors.byte_code import globals_of

OURS = ("polytrain", "polytrain_plugins", "polytrain_torch")
TRANSPARENT = (*OURS, "torch", "contextlib", "functools", "tqdm")
"""Packages whose frames, between the loop and its data, carry nothing that training reads."""

_SHOWN_ONLY = ("tqdm", "logging", "tensorboard", "wandb", "mlflow", "rich")
"""Packages whose objects show the training, and don't change it."""

_MOST_OBJECTS = 5_000
_FEW = 256
"""Longer containers, of which not all is plain, wait until the rest has been looked at."""

_MOST_ARRAY_BYTES = 64 << 20
_MOST_CONTAINER_BYTES = 16 << 20
_MOST_MEMORY_BYTES = 1 << 20
_SAMPLED_VALUES = 1024
_SAMPLED_ITEMS = 64
_CHUNK = 256

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_TYPES = frozenset(PLAIN)

_Reference = int | tuple[type, Any]
"""An object by its identity, or a plain value with its type."""


def plain(value: Any) -> tuple[type, Any]:
    """Return a plain value with its type; tuples have the same NaN be equal to itself."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return type(value), math.nan if is_nan else value


@dataclass(frozen=True, slots=True)
class _Object:
    look: Any
    """What it is, beside what it refers to."""

    refers: Sequence[_Reference] = ()


class Snapshot:
    """Takes down values, and compares them with another snapshot's."""

    def __init__(self, known: Sequence[Any], fetching: Collection[CodeType]) -> None:
        """
        Args:
            known: objects that checkpoints hold, or that rebuild themselves.
            fetching: the code through which batches come: generators of it are where these are.
        """
        self._fetching = fetching
        self._reached: dict[int, Any] = {}
        self._held: list[Any] = []
        self._objects: dict[int, _Object] = {}
        self._next: deque[Any] = deque()
        self._long: list[Any] = []
        self._arrays: list[Any] = []
        self._bytes_left = _MOST_CONTAINER_BYTES
        for each in known:
            self._reached[id(each)] = each
            self._objects[id(each)] = _Object(("known", self._identity(each)))

    def apart(self, fetching: Collection[CodeType]) -> Snapshot:
        """Return another snapshot with the same known objects; this one has no values yet."""
        found = Snapshot((), fetching)
        found._reached, found._objects = self._reached.copy(), self._objects.copy()
        found._held = self._held.copy()
        return found

    def add(self, value: Any) -> _Reference:
        """Return a reference to a value, which `take` is going to take down."""
        if isinstance(value, PLAIN):
            return plain(value)
        if id(value) not in self._reached:
            # Also what is made for this look: its number must not come back within it.
            self._reached[id(value)] = value
            self._next.append(value)
        return id(value)

    def take(self) -> None:
        """Take down all that was added."""
        while True:
            while self._next:
                value = self._next.popleft()
                is_beyond = len(self._objects) > _MOST_OBJECTS
                if is_beyond:
                    found: _Object | None = _Object((type(value), self._identity(value)))
                else:
                    found = self._look(value)
                if found is not None:
                    self._objects[id(value)] = found
            if not self._long:
                break
            self._long.sort(key=len, reverse=True)
            value = self._long.pop()
            self._objects[id(value)] = self._look_at_long(value)
        left = _MOST_ARRAY_BYTES
        for value in sorted(self._arrays, key=lambda each: each.nbytes):
            left -= value.nbytes
            self._objects[id(value)] = self._look_at_array(value, is_whole=left >= 0)
        self._arrays.clear()
        self._reached.clear()

    def equals(self, mine: _Reference, other: Snapshot, its: _Reference) -> bool:
        """Return whether a value holds what another snapshot's value held."""
        pairs, met = [(mine, its)], set()
        while pairs:
            pair = pairs.pop()
            one, two = pair
            if isinstance(one, int) and isinstance(two, int):
                if pair in met:
                    continue
                met.add(pair)
                here, there = self._objects[one], other._objects[two]
                if here.look != there.look or len(here.refers) != len(there.refers):
                    return False
                pairs.extend(zip(here.refers, there.refers, strict=True))
            elif one != two:
                return False
        return True

    def _identity(self, value: Any) -> int:
        """Return a number of an object that no other one gets, also once this one is gone."""
        try:
            # An object has one weak reference as long as somebody holds that.
            held: Any = weakref.ref(value)
        except TypeError:
            held = value
        self._held.append(held)
        return id(held)

    def _refer(self, look: Any, values: Iterator[Any] | Collection[Any]) -> _Object:
        return _Object(look, [self.add(each) for each in values])

    def _look(self, value: Any) -> _Object | None:
        """Return what an object is; None for what is looked at after all others."""
        kind = type(value)
        module = kind.__module__ or ""
        package = module.partition(".")[0]
        if package in OURS or package in _SHOWN_ONLY or "tensorboard" in module:
            return _Object(kind)
        match value:
            case torch.Tensor() if not _has_content(value):
                return _Object((kind, self._identity(value), version_of(value)))
            case np.memmap():
                # What is written there is in its file, where a restart finds it.
                return _Object(kind)
            case np.ndarray() if value.dtype.hasobject:
                return self._refer((kind, value.shape), (value.ravel().tolist(),))
            case torch.Tensor() | np.ndarray():
                self._arrays.append(value)
                return None
            case np.generic() | array.array():
                return _Object((kind, value.tobytes()))
            case bytearray():
                return _Object((kind, bytes(value)))
            case torch.Generator():
                return _Object((kind, value.get_state().numpy().tobytes()))
            case np.random.Generator():
                return _Object((kind, repr(value.bit_generator.state)))
            case np.random.RandomState():
                state: Any = value.get_state(legacy=False)
                return _Object((kind, digest(state)))
            case random.Random():
                return _Object((kind, value.getstate()))
            case list() | tuple() | set() | frozenset() | deque() | dict():
                return self._look_at_container(value)
            case FunctionType():
                return self._look_at_function(value)
            case GeneratorType():
                return self._look_at_generator(value)
            case MethodType():
                return self._refer(kind, (value.__self__, value.__func__))
            case BuiltinFunctionType():
                return self._refer((kind, value.__name__), (value.__self__,))
            case functools.partial():
                return self._refer(kind, (value.func, value.args, value.keywords))
            case ModuleType() | type() | torch.utils.data.DataLoader() | logging.Logger():
                return _Object(kind)
            case io.StringIO() | io.BytesIO() if not value.closed:
                return _Object((kind, value.getvalue(), value.tell()))
            case io.IOBase():
                return _look_at_file(value)
            case queue.SimpleQueue() if value.empty():
                return _Object(kind)
            case contextvars.ContextVar() | queue.SimpleQueue():
                return _moved()
        if module.startswith("torch._"):
            # A compiled module's own.
            return self._refer(kind, (original_module(value),))
        return self._look_at_instance(value)

    def _look_at_container(self, value: Any) -> _Object | None:
        kind = type(value)
        own = getattr(value, "__dict__", {}).values()
        if _is_flat(value):
            return self._refer((kind, _copied(value)), own)
        if len(value) > _FEW:
            self._long.append(value)
            return None
        return self._refer(*_parts_of(value, own))

    def _look_at_long(self, value: Any) -> _Object:
        kind = type(value)
        found = self._digest(value)
        if found is not None:
            return _Object((kind, found))
        look, parts = _parts_of(value, ())
        if len(self._objects) + len(parts) <= _MOST_OBJECTS:
            return self._refer(look, parts)
        same = tuple(each if type(each) in _PLAIN_TYPES else self._identity(each) for each in parts)
        return self._refer((look, same), parts[:: len(parts) // _SAMPLED_ITEMS])

    def _digest(self, value: Any) -> bytes | None:
        """Return a digest of nested plain values; None if there are others, or too many."""
        items = list(value.items()) if isinstance(value, dict) else list(value)
        found, left = hashlib.sha1(usedforsecurity=False), self._bytes_left
        for begin in range(0, len(items), _CHUNK):
            try:
                # Later versions' bytes depend on who else refers to the values.
                content = marshal.dumps(items[begin : begin + _CHUNK], 2)
            except ValueError:
                return None
            left -= len(content)
            if left < 0:
                return None
            found.update(content)
        self._bytes_left = left
        return found.digest()

    def _look_at_array(self, value: Any, *, is_whole: bool) -> _Object:
        kind = type(value)
        if is_whole:
            return _Object(
                (kind, digest(value.detach() if isinstance(value, torch.Tensor) else value))
            )
        look = (kind, self._identity(value), tuple(value.shape))
        if isinstance(value, np.ndarray):
            at = np.linspace(0, value.size - 1, _SAMPLED_VALUES).astype(np.int64)
            return _Object((*look, digest(value.flat[at])))
        at_ = torch.linspace(0, value.numel() - 1, _SAMPLED_VALUES, dtype=torch.float64).long()
        return _Object((*look, version_of(value), digest(torch.take(value.detach(), at_))))

    def _look_at_function(self, value: Any) -> _Object:
        look = (FunctionType, value.__code__)
        if (value.__module__ or "").partition(".")[0] in TRANSPARENT:
            return _Object(look)
        parts = [each.cell_contents for each in value.__closure__ or () if _is_full(each)]
        parts += [value.__defaults__, value.__kwdefaults__, value.__dict__]
        if not is_installed(value.__code__.co_filename):
            names = [name for name in globals_of(value.__code__) if name in value.__globals__]
            parts += [value.__globals__[name] for name in names]
        return self._refer(look, parts)

    def _look_at_generator(self, value: Any) -> _Object:
        look = (GeneratorType, value.gi_code, inspect.getgeneratorstate(value))
        if value.gi_frame is None or look[-1] == inspect.GEN_CREATED:
            return _Object(look)
        package = str(value.gi_frame.f_globals.get("__name__")).partition(".")[0]
        if package in TRANSPARENT or value.gi_code in self._fetching:
            return _Object(look[:2])
        # The iterators that it is in the middle of can't be seen.
        return _moved()

    def _look_at_instance(self, value: Any) -> _Object:
        kind = type(value)
        package = (kind.__module__ or "").partition(".")[0]
        if package in ("builtins", "itertools", "collections") and not hasattr(value, "__dict__"):
            # Iterators count where they are.
            try:
                return self._refer(kind, value.__reduce__())
            except TypeError:
                return _Object(kind)
        state = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                is_private = slot.startswith("__") and not slot.endswith("__")
                name = f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot
                if name != "__weakref__" and hasattr(value, name):
                    state[name] = getattr(value, name)
        if not state and package == "torch":
            return _Object((kind, repr(value)))
        if not state and hasattr(kind, "__next__"):
            # An iterator of compiled code: its place can't be seen.
            return _moved()
        if not state and (content := _memory_of(value)) is not None:
            return _Object((kind, content))
        return self._refer((kind, *state), state.values())


def _moved() -> _Object:
    """Return what an object is that has changed for all that can be seen."""
    return _Object(object())


def _look_at_file(value: io.IOBase) -> _Object:
    """Return what a file is: its place, if it is read. What is only written shows the training."""
    if value.closed:
        return _Object(type(value))
    try:
        return _Object((type(value), value.tell() if value.readable() else None))
    except (OSError, ValueError):
        # It is a pipe, or iterated over line by line.
        return _moved()


def _memory_of(value: Any) -> bytes | None:
    """Return what an object's own memory holds, such as a `ctypes` value's; None if it has none."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    with view:
        is_small = view.nbytes <= _MOST_MEMORY_BYTES
        return None if view.readonly or not is_small else view.tobytes()


def _has_content(value: torch.Tensor) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
    )


def _is_flat(value: Any) -> bool:
    """Whether a container has plain values only."""
    if isinstance(value, dict):
        return _PLAIN_TYPES.issuperset(map(type, value)) and _PLAIN_TYPES.issuperset(
            map(type, value.values())
        )
    return _PLAIN_TYPES.issuperset(map(type, value))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        # Its order too: it may be that of a cache.
        return tuple(value.items())
    return frozenset(value) if isinstance(value, set | frozenset) else tuple(value)


def _parts_of(value: Any, own: Collection[Any]) -> tuple[Any, list[Any]]:
    """Return what a container is, and what it refers to."""
    kind = type(value)
    if not isinstance(value, dict):
        return (kind, len(value)), [*value, *own]
    if _PLAIN_TYPES.issuperset(map(type, value)):
        return (kind, tuple(value)), [*value.values(), *own]
    return (kind, len(value)), [*value, *value.values(), *own]


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # it raises if it is empty
    except ValueError:
        return False
    return True
