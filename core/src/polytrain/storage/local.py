"""A directory as storage: a disk of this machine, or a file system that all nodes mount.

Relies on what NFS keeps too: creating a hard link is exclusive, and renaming a file replaces
another in one step. Directories are never renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from polytrain.storage.retry import retry

Answer = TypeVar("Answer")

_UNFINISHED = ".polytrain-unfinished-"
"""What the names of files begin with that are still being written."""

_CHUNK = 1 << 20

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What file systems say that have no hard links."""


class LocalStorage:
    """See `Storage`. What was written to a log survives this process at once."""

    is_local = True

    def __init__(self, root: Path, *, retry_s: float) -> None:
        self.root = str(root)
        self._root = root
        self._retry_s = retry_s

    def list(self, below: str) -> dict[str, int]:
        def found() -> dict[str, int]:
            start = self._root / below
            sizes = dict(_files_below(str(start))) if start.is_dir() else {}
            length = len(str(self._root)) + 1
            return {path[length:].replace(os.sep, "/"): size for path, size in sizes.items()}

        return self._retrying(found)

    def read(self, path: str) -> bytes:
        return self._retrying((self._root / path).read_bytes)

    def write(self, path: str, data: bytes) -> None:
        def write() -> None:
            with self._unfinished(path) as unfinished:
                _write_durably(unfinished, data)
                unfinished.replace(self._root / path)
            _sync_directory((self._root / path).parent)

        self._retrying(write)

    def create(self, path: str, data: bytes) -> str | None:
        def create() -> str | None:
            target = self._root / path
            with self._unfinished(path) as unfinished:
                _write_durably(unfinished, data)
                try:
                    os.link(unfinished, target)
                except FileExistsError:
                    # An answer of NFS that got lost makes its client ask twice.
                    if unfinished.stat().st_nlink != 2:
                        return None
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    if not _created_without_links(target, data):
                        return None
            _sync_directory(target.parent)
            return path

        return self._retrying(create)

    def put(self, file: Path, path: str, *, move: bool) -> str:
        def put() -> str:
            target = self._root / path
            digest = _moved(file, target) if move else None
            if digest is None:
                with self._unfinished(path) as unfinished:
                    digest = _copy_durably(file, unfinished)
                    unfinished.replace(target)
            _sync_directory(target.parent)
            return digest

        return self._retrying(put)

    def get(self, path: str, file: Path) -> str:
        return self._retrying(lambda: _copy_durably(self._root / path, file))

    def digest(self, path: str) -> str:
        def digest() -> str:
            with (self._root / path).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return self._retrying(digest)

    def delete(self, path: str) -> None:
        self._retrying(lambda: (self._root / path).unlink(missing_ok=True))

    def delete_below(self, directory: str) -> None:
        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._root / directory)

        self._retrying(delete)

    def open_log(self, path: str, *, series: str) -> LocalLog:
        # One file has them all: appending needs no series.
        return LocalLog(self._existing((self._root / path).parent) / Path(path).name)

    def read_log(self, path: str) -> str:
        try:
            return self.read(path).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def stamp(self, path: str) -> tuple[int, ...]:
        """What changes whenever the file does."""
        status = (self._root / path).stat()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _retrying(self, call: Callable[[], Answer]) -> Answer:
        return retry(call, retry_s=self._retry_s, what=f"Storage {self.root}")

    def _existing(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    @contextlib.contextmanager
    def _unfinished(self, path: str) -> Iterator[Path]:
        """A name beside the final one; what is left under it in the end is removed."""
        directory = self._existing((self._root / path).parent)
        unfinished = directory / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)


class LocalLog:
    """A file that lines are appended to."""

    def __init__(self, path: Path) -> None:
        # Line by line to the kernel: what has been written survives this process.
        self._file: IO[str] = path.open("a", buffering=1)
        self._lock = threading.Lock()
        if _is_torn(path):
            self._file.write("\n")

    def write(self, text: str) -> None:
        with self._lock:
            self._file.write(text)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def __enter__(self) -> LocalLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end, because its writer had one."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _files_below(directory: str) -> Iterator[tuple[str, int]]:
    # What is being replaced or deleted just now isn't there.
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            elif not entry.name.startswith(_UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.path, entry.stat().st_size


def _moved(file: Path, target: Path) -> str | None:
    """Move a file that has no other name, and return its digest; None if it has to be copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    status = file.stat()
    if status.st_nlink != 1 or status.st_dev != target.parent.stat().st_dev:
        return None
    digest = _digest_durably(file)
    try:
        file.replace(target)
    except OSError as error:
        # The same device, mounted twice.
        if error.errno != errno.EXDEV:
            raise
        return None
    return digest


def _created_without_links(path: Path, data: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(data)
            _sync(file)
    except FileExistsError:
        return False
    return True


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _digest_durably(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


def _copy_durably(source: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK):
            digest.update(chunk)
            writing.write(chunk)
        _sync(writing)
    return digest.hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make the names in a directory survive the machine, where its file system has that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
