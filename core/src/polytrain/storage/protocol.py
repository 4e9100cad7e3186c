"""The protocol of every storage, its errors, and a check of the names that it lists."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

READS_AT_MOST = 1 << 30
"""Maximum bytes to read whole; the limit for all return values of a run is a quarter of it."""


_PIECE = 1 << 22
"""Bytes to copy at a time."""


class Log(Protocol):
    """An append-only file of a storage. It is thread-safe."""

    @property
    def unsynced(self) -> int:
        """Characters that are lost with this process unless they are synced."""

    def write(self, text: str) -> None:
        """Append whole lines, which replace all drafts.

        The storage's class says when they survive this process.
        """

    def draft(self, text: str) -> None:
        """Append whole lines that last until the next `write`.

        They survive this process if written lines do without a sync, and are read after them.
        """

    def sync(self) -> None:
        """Return once all written lines survive the machine."""

    def __enter__(self) -> Log:
        """Return the log itself."""

    def __exit__(self, *_: object) -> None:
        """Write the remaining lines, and release the file."""


class Storage(Protocol):
    """Files below one root. Paths are relative to it, with forward slashes.

    Calls that fail for a temporary reason are retried for the location's `retry_s`. Then they raise
    OSError. A missing file is a FileNotFoundError.
    """

    root: str
    """The directory, or the address."""

    is_local: bool
    """Whether the root is a directory of this machine, or one that it mounts."""

    def list(self, below: str) -> dict[str, int]:
        """Return the paths of all files in this directory and below, with their sizes in bytes."""

    def read(self, path: str, *, at_most: int = READS_AT_MOST) -> bytes:
        """Return a file's content.

        Args:
            at_most: maximum bytes. A larger file is an OSError (EFBIG), so that nobody who can
                write to the storage can fill this process's memory.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, or replace it. When this returns it survives the machine."""

    def replace(self, path: str, data: bytes, *, check: Callable[[], None]) -> None:
        """Replace a small file, unless a check raises.

        If its directory is renamed or deleted meanwhile, nothing is written where it was. Only a
        storage that `is_local` can promise this.
        """

    def create(self, path: str, data: bytes) -> str | None:
        """Write a small file unless it exists. Of several concurrent calls, at most one succeeds.

        Returns:
            The path of the new file, which begins with `path`; None if it existed.
        """

    def put(self, file: Path, path: str, *, move: bool) -> str:
        """Store a local file, and return the SHA-256 of what was stored, in hexadecimal.

        Args:
            path: the path to store it at; an existing file is replaced.
            move: whether the local file may be moved, because nobody needs it any more.
        """

    def get(self, path: str, file: Path) -> str:
        """Write a stored file's content to a new local file; return its SHA-256 in hexadecimal."""

    def digest(self, path: str) -> str:
        """Return the SHA-256 of a stored file's content, in hexadecimal."""

    def delete(self, path: str) -> None:
        """Delete a file; no error if it doesn't exist."""

    def delete_below(self, directory: str) -> None:
        """Delete a directory and its content; no error if it doesn't exist."""

    def open_log(self, path: str, *, series: str) -> Log:
        """Open a log to append to.

        Args:
            series: unique to this writer; sorts after those of earlier writers.
        """

    def read_log(self, path: str) -> Iterator[bytes]:
        """Yield the content of a log, of all its writers, in pieces; none if it doesn't exist.

        A line that was a draft before it was appended may appear twice.
        """

    def log_state(self, path: str) -> Mapping[str, int]:
        """Return the log's files and their sizes in bytes, which change with every line."""


def expect_inside(name: str) -> str:
    """Return the name if, as a path, it stays in the directory that it is joined to.

    Keys of objects and names in manifests may be any text, and could lead anywhere.

    Args:
        name: relative to that directory, with forward slashes.

    Raises:
        ValueError: it leads elsewhere, or could; the message names it.
    """
    wrong = _reason_not_inside(name)
    if wrong is not None:
        raise ValueError(f"{name!r}, which the storage tells of, isn't used as a path: {wrong}")
    return name


def _reason_not_inside(name: str) -> str | None:
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it holds a NUL"
    if name.startswith("/"):
        return "it is absolute"
    if not {".", ".."}.isdisjoint(name.split("/")):
        return "one of its parts is '.' or '..'"
    return None


class StorageError(OSError):
    """A run's storage refused a call, or couldn't be reached; `cause` is the original error."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(*cause.args)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.cause)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Mark errors of the block as the storage's.

    Raises:
        StorageError: in place of any OSError.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error) from error


def copied(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> str:
    """Copy a file in pieces, and return its SHA-256 in hexadecimal.

    Args:
        read: returns the next piece, of at most this many bytes.
        write: takes it.
    """
    digest = hashlib.sha256()
    while piece := read(_PIECE):
        digest.update(piece)
        write(piece)
    return digest.hexdigest()


def expect_size(path: str, size: int, at_most: int) -> None:
    """Check that a file is small enough to be read whole; sizes are in bytes.

    Raises:
        OSError: it is larger than `at_most`.
    """
    if size > at_most:
        what = f"it has more than {at_most:,} bytes, and no file of a run of this name has"
        raise OSError(errno.EFBIG, what, path)
