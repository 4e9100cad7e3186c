"""What the rest of the code may ask of a storage, whatever it is."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol


class Log(Protocol):
    """A file of a storage that only grows. Threads may share it."""

    def write(self, text: str) -> None:
        """Append whole lines. What was written survives this process as far as `Storage` says."""

    def sync(self) -> None:
        """Return once everything that was written survives the machine."""

    def __enter__(self) -> Log:
        """The log itself."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write what is left, and release the file."""


class Storage(Protocol):
    """Files below one root. Paths are relative to it, with forward slashes.

    Calls that fail for a passing reason are repeated for as long as the storage's patience lasts.
    All of them raise OSError when it doesn't work; a file that isn't there is a FileNotFoundError.
    """

    root: str
    """The directory, or the address."""

    is_local: bool
    """Whether the root is a directory of this machine, or one that it mounts."""

    def list(self, below: str) -> dict[str, int]:
        """Paths of all files in this directory and below, with their sizes in bytes."""

    def read(self, path: str) -> bytes:
        """A file's content."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, or replace it. When this returns it survives the machine."""

    def create(self, path: str, data: bytes) -> str | None:
        """Write a small file unless there is one: of several who try at once, at most one succeeds.

        Returns:
            The path that it has really got, which begins with `path`; None if there was one.
        """

    def put(self, file: Path, path: str, *, move: bool) -> str:
        """Store a local file, and return the SHA-256 of what was stored, in hexadecimal.

        Args:
            file: to be stored.
            path: its place; a file there is replaced.
            give_up: nobody needs the local file any more, so it may be moved.
        """

    def get(self, path: str, file: Path) -> str:
        """Write a stored file's content to a new local file; return its SHA-256 in hexadecimal."""

    def digest(self, path: str) -> str:
        """SHA-256 of a stored file's content, in hexadecimal."""

    def delete(self, path: str) -> None:
        """Delete a file; it needn't be there."""

    def delete_below(self, directory: str) -> None:
        """Delete a directory with all that is in it; it needn't be there."""

    def open_log(self, path: str, *, series: str) -> Log:
        """A log to append to.

        Args:
            path: of the log.
            series: sorts behind those of earlier writers, and is this writer's alone.
        """

    def read_log(self, path: str) -> str:
        """All that was written to a log, by all its writers; empty if there is none."""
