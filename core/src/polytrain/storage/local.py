"""A directory as storage: a disk of this machine, or a file system that all nodes mount.

This relies on two guarantees that NFS has too: creating a hard link is exclusive, and renaming a
file over another is atomic. Directories are never renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from polytrain.storage.failure import expect_size
from polytrain.storage.protocol import READS_AT_MOST
from polytrain.storage.retry import retry

Answer = TypeVar("Answer")

_UNFINISHED = ".polytrain-unfinished-"
"""Prefix of the names of files that are still being written."""

_CHUNK = 1 << 20

_PIECE = 1 << 22
"""Bytes of a log that are read at once."""

_DRAFTS = ".drafts-"
"""Behind a log's name, and before a writer's series: the name of that writer's drafts."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links."""


class LocalStorage:
    """See `Storage`. A line that was written to a log survives this process at once."""

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

    def read(self, path: str, *, at_most: int = READS_AT_MOST) -> bytes:
        def read() -> bytes:
            with (self._root / path).open("rb") as file:
                expect_size(path, os.fstat(file.fileno()).st_size, at_most)
                return file.read()

        return self._retrying(read)

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
                    # If an answer of NFS is lost, its client asks twice.
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
        # One file has the lines of all writers: appending needs no series. Drafts do.
        own = f"{path}{_DRAFTS}{series}"

        def open_log() -> LocalLog:
            self._existing((self._root / path).parent)
            return LocalLog(self._root / path, self._root / own, retry_s=self._retry_s)

        log = self._retrying(open_log)
        for drafts in self._drafts_of(path):
            if drafts > own:
                break
            # Their writer is gone, or has lost the run.
            log.write(self.read(drafts).decode(errors="replace"))
            self.delete(drafts)
        return log

    def read_log(self, path: str) -> Iterator[bytes]:
        # Drafts first: meanwhile they may be appended, and would be in neither.
        drafts = [b"".join(self._pieces(drafts)) for drafts in self._drafts_of(path)]
        yield from self._pieces(path)
        for each in filter(None, drafts):
            yield b"\n" + each

    def log_state(self, path: str) -> Mapping[str, int]:
        return {name: self._size(name) for name in (path, *self._drafts_of(path))}

    def _drafts_of(self, path: str) -> Sequence[str]:
        """Paths of the drafts of a log, in their writers' order."""
        directory, _, name = path.rpartition("/")
        start = f"{name}{_DRAFTS}"

        def found() -> Sequence[str]:
            try:
                names = os.listdir(self._root / directory)
            except FileNotFoundError:
                return ()
            return sorted(
                f"{directory}/{each}".lstrip("/") for each in names if each.startswith(start)
            )

        return self._retrying(found)

    def _pieces(self, path: str) -> Iterator[bytes]:
        """The content of a file; nothing if there is none."""
        start = 0

        def read() -> bytes:
            try:
                with (self._root / path).open("rb") as file:
                    file.seek(start)
                    return file.read(_PIECE)
            except FileNotFoundError:
                return b""

        while piece := self._retrying(read):
            start += len(piece)
            yield piece

    def _size(self, path: str) -> int:
        def size() -> int:
            try:
                return (self._root / path).stat().st_size
            except FileNotFoundError:
                return 0

        return self._retrying(size)

    def _retrying(self, call: Callable[[], Answer]) -> Answer:
        return retry(call, retry_s=self._retry_s, what=f"Storage {self.root}")

    def _existing(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    @contextlib.contextmanager
    def _unfinished(self, path: str) -> Iterator[Path]:
        """A temporary name beside the final one; a file that keeps it is removed at the end."""
        directory = self._existing((self._root / path).parent)
        unfinished = directory / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)


class LocalLog:
    """A file that lines are appended to, and one beside it with the drafts."""

    unsynced = 0

    def __init__(self, path: Path, drafts: Path, *, retry_s: float) -> None:
        self._retry_s = retry_s
        self._lines = _AppendedFile(path)
        self._drafts_path = drafts
        self._drafts: _AppendedFile | None = None
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        with self._lock:
            self._lines.unwritten += text.encode()
            self._retrying(self._lines.write)
            if self._drafts is not None:
                self._retrying(self._drafts.empty)

    def draft(self, text: str) -> None:
        with self._lock:
            if self._drafts is None:
                self._drafts = retry(
                    lambda: _AppendedFile(self._drafts_path),
                    retry_s=self._retry_s,
                    what=str(self._drafts_path),
                )
            self._drafts.unwritten += text.encode()
            self._retrying(self._drafts.write)

    def sync(self) -> None:
        self._retrying(self._lines.sync)

    def __enter__(self) -> LocalLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lines.close()
        if self._drafts is not None:
            self._drafts.close()
            if not self._drafts.size:
                self._drafts_path.unlink(missing_ok=True)

    def _retrying(self, call: Callable[[], None]) -> None:
        try:
            # A line for each report: arranging for a repetition takes longer than writing it.
            call()
        except OSError:
            if not self._retry_s:
                raise
            retry(call, retry_s=self._retry_s, what=str(self._lines.path))


class _AppendedFile:
    """A file without a buffer of Python's: what has been written survives this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self.unwritten = b"\n" if _is_torn(path) else b""
        self.size = 0
        """Bytes that were written here."""

    def write(self) -> None:
        # As much as the system takes at once: what it has taken isn't written again after an error.
        while self.unwritten:
            written = os.write(self._descriptor, self.unwritten)
            self.unwritten = self.unwritten[written:]
            self.size += written

    def empty(self) -> None:
        self.unwritten = b""
        if self.size:
            os.ftruncate(self._descriptor, 0)
            self.size = 0

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _is_torn(path: Path) -> bool:
    """Whether the last line is incomplete, because its writer died."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _files_below(directory: str) -> Iterator[tuple[str, int]]:
    # A file may be replaced or deleted at this moment.
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            elif not entry.name.startswith(_UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.path, entry.stat().st_size


def _moved(file: Path, target: Path) -> str | None:
    """Move a file without other hard links, and return its digest; None if it must be copied."""
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
    """Make the names in a directory survive the machine, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
