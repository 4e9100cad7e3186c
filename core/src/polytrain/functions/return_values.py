"""Return values of training functions: encoded in worker processes, read by driver and users.

Plain values are stored in a form that is read without running code. Other values are pickled, and
reading a pickle can run code: those of a stored run are read only on request.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import msgpack

from polytrain.errors import ReturnValueError
from polytrain.functions.pickling import Pickler
from polytrain_plugins.type_names import a_type

Kind = Literal["plain", "pickled", "lost"]

_LARGEST = 16 << 20
"""Maximum bytes of one rank's value."""

_LARGEST_OF_ALL = 256 << 20
"""Maximum bytes of all values together, which the driver holds, besides rank 0's."""

_TUPLE, _ARRAY = 1, 2
"""Codes of types that msgpack lacks."""

_TUPLES = 32
"""Maximum levels of tuples. Each is a nested call of msgpack, with tens of kilobytes of stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The encoded return value of one rank's training function."""

    kind: Kind
    data: bytes = b""
    """The encoded value; empty if it is lost."""

    why: str = ""
    """The reason that it is lost, as a sentence."""

    def value(self, *, rank: int, may_unpickle: bool) -> Any:
        """Decode the value.

        Raises:
            ReturnValueError: it is lost, it can't be decoded here, or it is pickled and must not be
                unpickled.
        """
        if self.kind == "lost":
            raise ReturnValueError(f"What rank {rank} has returned isn't kept: {self.why}")
        if self.kind == "pickled" and not may_unpickle:
            raise ReturnValueError(
                f"What rank {rank} has returned is stored as a pickle, which can run code when it "
                "is read. If you trust the run's directory, read it by "
                "Result.from_path(path, allow_pickle=True)."
            )
        try:
            return _plain(self.data) if self.kind == "plain" else pickle.loads(self.data)
        except Exception as error:  # a pickle may raise anything
            raise ReturnValueError(
                f"What rank {rank} has returned can't be read in this process: "
                f"{type(error).__name__}: {error}"
            ) from error


def encoded(value: Any, *, rank: int, world_size: int) -> Returned:
    """Encode a training function's return value. Never raises."""
    limit = _LARGEST if rank == 0 else min(_LARGEST, _LARGEST_OF_ALL // world_size)
    kind: Kind = "plain"
    try:
        try:
            data = _packed(value, limit)
        except (TypeError, ValueError, OverflowError):  # it contains a value that isn't plain
            kind, data = "pickled", _pickled(value, limit)
        if len(data) > limit:
            raise _TooLargeError
    except _TooLargeError:
        why = (
            f"it takes more than {limit / 2**20:,.1f} MiB, the limit for this rank. Report large "
            "values as a checkpoint's files."
        )
        return Returned(kind="lost", why=why)
    except Exception as error:  # an object may raise anything when it is pickled
        why = (
            f"{a_type(value)} can't be pickled ({type(error).__name__}: {error}). Return "
            "plain values or arrays, or report a checkpoint."
        )
        return Returned(kind="lost", why=why)
    return Returned(kind=kind, data=data)


def to_bytes(returned: Sequence[Returned | None]) -> bytes:
    """Encode all ranks' values to be stored with a run."""
    packed: bytes = msgpack.packb([it and [it.kind, it.data, it.why] for it in returned])
    return packed


def from_bytes(data: bytes) -> tuple[Returned | None, ...]:
    """Decode the result of `to_bytes`.

    Raises:
        ValueError: it has another format.
    """
    try:
        return tuple(None if each is None else _returned(*each) for each in msgpack.unpackb(data))
    except Exception as error:  # msgpack has many exceptions
        raise ValueError(f"not the return values of a run: {error!r}") from error


def _returned(kind: Any, data: Any, why: Any) -> Returned:
    if kind not in get_args(Kind) or type(data) is not bytes or type(why) is not str:
        raise TypeError(f"{kind!r} is no kind of return value, or it has other fields")
    return Returned(kind=kind, data=data, why=why)


class _TooLargeError(Exception):
    """A value exceeds its limit. Raised while pickling, since a model may fill half the memory."""


class _LimitedFile(io.BytesIO):
    """A memory file of limited size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, data: Any, /) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise _TooLargeError
        return super().write(data)


def _pickled(value: Any, limit: int) -> bytes:
    file = _LimitedFile(limit)
    Pickler(file).dump(value)
    return file.getvalue()


def _packed(value: Any, limit: int, levels: int = _TUPLES) -> bytes:
    def extension(inner: Any) -> msgpack.ExtType:
        if type(inner) is tuple:
            if not levels:
                raise ValueError("tuples are nested too deeply")
            return msgpack.ExtType(_TUPLE, _packed(list(inner), limit, levels - 1))
        if type(inner).__module__ == "numpy":
            import numpy as np

            is_scalar = isinstance(inner, np.generic)
            if is_scalar or type(inner) is np.ndarray:
                file = _LimitedFile(limit)
                np.save(file, inner, allow_pickle=False)
                return msgpack.ExtType(_ARRAY, bytes([is_scalar]) + file.getvalue())
        raise TypeError(f"{a_type(inner)} isn't plain")

    # Strict types: otherwise a subclass would be read back as its base class.
    packed: bytes = msgpack.packb(value, default=extension, strict_types=True)
    return packed


def _plain(data: bytes, levels: int = _TUPLES) -> Any:
    of_extension = partial(_of_extension, levels=levels)
    return msgpack.unpackb(data, ext_hook=of_extension, strict_map_key=False)


def _of_extension(code: int, data: bytes, *, levels: int) -> Any:
    if code == _TUPLE:
        if not levels:
            raise ValueError("tuples are nested too deeply")
        return tuple(_plain(data, levels - 1))
    if code == _ARRAY:
        import numpy as np

        array = np.load(io.BytesIO(data[1:]), allow_pickle=False)
        return array[()] if data[0] else array
    raise ValueError(f"unknown type {code}")
