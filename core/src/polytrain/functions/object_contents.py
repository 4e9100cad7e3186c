"""What an object holds: what pickle would store of it, as values. Nothing is pickled."""

from __future__ import annotations

import copyreg
import hashlib
import logging
import pickle
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_WHOLE_BYTES = 256 << 20
"""Data up to this size are hashed whole: a few tenths of a second. No more are sent to a worker."""

_BLOCK = 4096
_BLOCKS = 1 << 14
"""Blocks of larger data that are hashed, at even distances: 64 MiB."""

_PROTOCOL = 5


class NotStored(Exception):  # an answer
    """Pickle can't store an object."""

    def __init__(self, held: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.held = held
        """What can be seen of it."""


def content_of(value: Any) -> tuple[Any, ...]:
    """Return the values that make up an object.

    Raises:
        NotStored: pickle can't store it. That of what it holds is no reason.
    """
    kind = type(value)
    if issubclass(kind, logging.Logger) or kind.__module__.partition(".")[0] == "ray":
        # What a logger remembers changes no result; Ray's objects are numbered anew in each run.
        return ()
    if issubclass(kind, MappingProxyType):
        return (dict(value),)
    try:
        if issubclass(kind, memoryview | pickle.PickleBuffer):
            return (_digest(value),)
        return _of_array(value) or _of_model(value) or _reduced(value)
    except Exception as error:  # an object's methods may raise anything
        raise NotStored(_visible(value)) from error


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's own attributes, without running code of its class."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}


def _reduced(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    how = copyreg.dispatch_table.get(kind)
    reduced: Any = value.__reduce_ex__(_PROTOCOL) if how is None else how(value)
    if isinstance(reduced, str):  # the name of a global variable
        return (reduced,)
    held = list(reduced)
    # Items and pairs, if there are any.
    for place, made in zip(range(3, len(held)), (list, dict), strict=False):
        held[place] = None if held[place] is None else made(held[place])
    return tuple(held[:5])


def _of_array(value: Any) -> tuple[Any, ...] | None:
    """Return the content of an array or a tensor, in any layout and on any device."""
    kind = type(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        if value.dtype.hasobject or value.dtype.names:
            # Between the fields there may be anything.
            return str(value.dtype), value.shape, value.tolist()
        return value.dtype.str, value.shape, _digest(numpy.ascontiguousarray(value).reshape(-1))
    # Another thread may be importing torch just now.
    if torch and hasattr(torch, "nn") and kind in (torch.Tensor, torch.nn.Parameter):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), _digest(flat.view(torch.uint8).numpy())
    return None


def _of_model(value: Any) -> tuple[Any, ...] | None:
    """Return the content of a Keras model or layer, whose pickle has the time in it."""
    if "keras" in sys.modules and isinstance(value, sys.modules["keras"].layers.Layer):
        return value.get_config(), value.get_weights()
    return None


def _visible(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return (dict(value.items()),)
    return (attributes_of(value),)


def _digest(data: Any) -> bytes:
    """Return the digest of a buffer's bytes; of a large one's size and a sample."""
    view = data.raw() if isinstance(data, pickle.PickleBuffer) else memoryview(data)
    if not view.contiguous:
        view = memoryview(view.tobytes())
    if view.nbytes == 0:
        return b""
    view = view.cast("B")
    if view.nbytes <= _WHOLE_BYTES:
        return hashlib.sha256(view).digest()
    digest = hashlib.sha256(str(view.nbytes).encode())
    last = view.nbytes - _BLOCK
    for number in range(_BLOCKS):
        at = last * number // (_BLOCKS - 1)
        digest.update(view[at : at + _BLOCK])
    return digest.digest()
