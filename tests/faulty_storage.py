"""A file system of fsspec's kind that fails as told: at a certain call, for a while, half-way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple

from fsspec import AbstractFileSystem

ERROR = "the line to the storage is down"
"""What the injected error says."""

Kind = Literal["ls", "info", "mkdir", "rm", "rmdir", "open", "create", "read", "write"]
"""What is asked of the file system: `create` opens a file to write it anew."""


class Call(NamedTuple):
    """One call that has reached the file system."""

    kind: Kind
    path: str


Fault = Callable[[int, Call], None]
"""Is told of a call, and how many there were before; what it raises is the call's outcome."""


def never(number: int, call: Call) -> None:
    """No fault."""


class Short(Exception):
    """What a fault raises so that only half of the data is written, or read."""

    def __init__(self, *, is_silent: bool) -> None:
        super().__init__(is_silent)
        self.is_silent = is_silent

    @classmethod
    def loudly(cls) -> Short:
        """Then the call fails."""
        return cls(is_silent=False)

    @classmethod
    def silently(cls) -> Short:
        """Then nobody is told."""
        return cls(is_silent=True)


def out() -> OSError:
    """What a passing fault raises."""
    return OSError(errno.EIO, ERROR)


def full() -> OSError:
    """What a disk says that has no room left."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Once:
    """A fault of one call."""

    at: int
    error: Callable[[], BaseException] = out

    def __call__(self, number: int, call: Call) -> None:
        if number == self.at:
            raise self.error()


@dataclass
class FromThenOn:
    """A fault that doesn't pass."""

    at: int
    error: Callable[[], BaseException] = out
    kinds: frozenset[Kind] | None = None
    """Of which calls; None is all."""

    def __call__(self, number: int, call: Call) -> None:
        if number >= self.at and (self.kinds is None or call.kind in self.kinds):
            raise self.error()


@dataclass
class Faults:
    """What has been asked of a file system, and what is to go wrong."""

    fault: Fault = never
    calls: list[Call] = field(default_factory=list)

    def take(self, kind: Kind, path: str) -> None:
        """A call has come in."""
        call = Call(kind, path)
        self.calls.append(call)
        self.fault(len(self.calls) - 1, call)


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """The files below a directory. It says of itself no more than the simplest ones do.

    All that isn't here is fsspec's own, made of these calls.
    """

    protocol = "faulty"
    cachable = False

    def __init__(self, root: Path, faults: Faults | None = None) -> None:
        super().__init__()
        self._root = root
        self.faults = Faults() if faults is None else faults

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.faults.take("ls", path)
        local = self._local(path)
        if local.is_dir():
            entries = []
            for name in sorted(local.iterdir()):
                # Others delete files too.
                with suppress(FileNotFoundError):
                    entries.append(self._entry(name))
        else:
            entries = [self._entry(local)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.faults.take("info", path)
        return self._entry(self._local(path))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        self.faults.take("mkdir", path)
        self._local(path).mkdir(parents=create_parents)

    def rm_file(self, path: str) -> None:
        self.faults.take("rm", path)
        self._local(path).unlink()

    def rmdir(self, path: str) -> None:
        self.faults.take("rmdir", path)
        self._local(path).rmdir()

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.faults.take("create" if mode == "wb" else "open", path)
        return _File(self._local(path).open(mode), path, self.faults)

    def _local(self, path: str) -> Path:
        stripped: str = self._strip_protocol(path)
        return self._root / stripped.lstrip("/")

    def _entry(self, local: Path) -> dict[str, Any]:
        name = local.relative_to(self._root).as_posix()
        if local.is_dir():
            return {"name": name, "size": 0, "type": "directory"}
        return {"name": name, "size": local.stat().st_size, "type": "file"}


class _File(AbstractContextManager["_File"]):
    """What Arrow wants of an open file."""

    def __init__(self, file: IO[bytes], path: str, faults: Faults) -> None:
        self._file = file
        self._path = path
        self._faults = faults

    @property
    def closed(self) -> bool:
        return self._file.closed

    def read(self, size: int = -1) -> bytes:
        try:
            self._faults.take("read", self._path)
        except Short as short:
            data = self._file.read(size)
            if not short.is_silent:
                raise out() from None
            return data[: len(data) // 2]
        return self._file.read(size)

    def write(self, data: bytes) -> int:
        try:
            self._faults.take("write", self._path)
        except Short as short:
            self._file.write(data[: len(data) // 2])
            if not short.is_silent:
                raise out() from None
        else:
            self._file.write(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
