"""The protocol of every storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

READS_AT_MOST = 1 << 30
"""Maximum bytes to read whole; the limit for all return values of a run is a quarter of it."""


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            path: the file.
            at_most: maximum bytes. A larger file is an OSError (EFBIG), so that nobody who can
                write to the storage can fill this process's memory.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, or replace it. When this returns it survives the machine."""

    def create(self, path: str, data: bytes) -> str | None:
        """Write a small file unless it exists. Of several concurrent calls, at most one succeeds.

        Returns:
            The path of the new file, which begins with `path`; None if it existed.
        """

    def put(self, file: Path, path: str, *, move: bool) -> str:
        """Store a local file, and return the SHA-256 of what was stored, in hexadecimal.

        Args:
            file: the local file.
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
            path: the log.
            series: unique to this writer; sorts after those of earlier writers.
        """

    def read_log(self, path: str) -> Iterator[bytes]:
        """Yield the content of a log, of all its writers, in pieces; none if it doesn't exist.

        A line that was a draft before it was appended may appear twice.
        """

    def log_state(self, path: str) -> Mapping[str, int]:
        """Return the log's files and their sizes in bytes, which change with every line."""
