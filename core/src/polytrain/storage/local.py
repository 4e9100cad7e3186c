"""A directory as storage: a disk of this machine, or a file system that all nodes mount.

This relies on two guarantees that NFS has too: creating a hard link is exclusive, and renaming a
file over another is atomic. Directories are never renamed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import StorageHealth, retry
from polytrain.storage.protocol import READS_AT_MOST, copied, expect_size

Answer = TypeVar("Answer")

_PIECE = 1 << 22
"""Bytes of a log to read at a time."""

DRAFTS = ".drafts-"
"""Joins a log's name and a writer's series to the name of that writer's drafts."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links."""


class LocalStorage:
    """See `Storage`. A line written to a log survives this process immediately.

    No link below the root is followed; see `beneath`.
    """

    is_local = True

    def __init__(self, root: Path, *, retry_s: float, health: StorageHealth | None = None) -> None:
        self.root = str(root)
        self._root = root
        self._files = Beneath(root)
        self._retry_s = retry_s
        self._health = StorageHealth() if health is None else health

    def list(self, below: str) -> dict[str, int]:
        def found() -> dict[str, int]:
            try:
                return {
                    path: status.st_size for path, status in self._files.files(below.rstrip("/"))
                }
            except (FileNotFoundError, NotADirectoryError):
                return {}

        return self._retrying(found)

    def read(self, path: str, *, at_most: int = READS_AT_MOST) -> bytes:
        def read() -> bytes:
            with self._files.reading(path) as file:
                expect_size(path, os.fstat(file.fileno()).st_size, at_most)
                return file.read()

        return self._retrying(read)

    def write(self, path: str, data: bytes) -> None:
        def write() -> None:
            with self._files.new_file(path) as new:
                new.file.write(data)
                new.replace()

        self._retrying(write, syncs=True)

    def replace(self, path: str, data: bytes, *, check: Callable[[], None]) -> None:
        def replace() -> None:
            try:
                # The directory is open before the check: whoever renames it later takes the new
                # file along.
                with self._files.new_file(path, make=False) as new:
                    check()
                    new.file.write(data)
                    new.replace()
            except FileNotFoundError:
                check()
                raise

        self._retrying(replace, syncs=True)

    def create(self, path: str, data: bytes) -> str | None:
        def create() -> str | None:
            with self._files.new_file(path) as new:
                new.file.write(data)
                try:
                    is_created = new.link()
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    is_created = self._created_without_links(path, data)
            return path if is_created else None

        return self._retrying(create, syncs=True)

    def put(self, file: Path, path: str, *, move: bool) -> str:
        def put() -> str:
            source, name = self._source(file)
            digest = self._moved(source, name, path) if move else None
            if digest is None:
                with source.reading(name) as reading, self._files.new_file(path) as new:
                    digest = copied(reading.read, new.file.write)
                    new.replace()
            return digest

        return self._retrying(put, syncs=True, is_costly=True)

    def get(self, path: str, file: Path) -> str:
        def get() -> str:
            with (
                self._files.reading(path) as reading,
                Beneath(file.parent).overwriting(file.name) as writing,
            ):
                digest = copied(reading.read, writing.write)
                _sync(writing)
                return digest

        return self._retrying(get)

    def digest(self, path: str) -> str:
        def digest() -> str:
            with self._files.reading(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return self._retrying(digest)

    def delete(self, path: str) -> None:
        self._retrying(lambda: self._files.delete(path))

    def delete_below(self, directory: str) -> None:
        self._retrying(lambda: self._files.delete_below(directory))

    def open_log(self, path: str, *, series: str) -> LocalLog:
        # All writers append to one file, so only their drafts need a series.
        own = f"{path}{DRAFTS}{series}"
        lines = path if self._parts_of(path) == [path] else f"{path}/{series}"

        def open_log() -> LocalLog:
            return LocalLog(self._files, lines, own, retry_s=self._retry_s, health=self._health)

        with ExitStack() as opened:
            log = opened.enter_context(self._retrying(open_log))
            for drafts in self._drafts_of(path):
                if drafts > own:
                    break
                # Their writer is gone, or has lost its lease.
                text = b"".join(self._pieces(drafts, single=True)).decode(errors="replace")
                # Its last line may be incomplete.
                log.write(text if text.endswith("\n") or not text else f"{text}\n")
                self.delete(drafts)
            opened.pop_all()
        return log

    def read_log(self, path: str) -> Iterator[bytes]:
        # Read drafts first: a draft that moves to the log meanwhile would otherwise be missed.
        drafts = [b"".join(self._pieces(each, single=True)) for each in self._drafts_of(path)]
        for part in self._parts_of(path):
            yield from self._pieces(part)
            if part != path:
                # The last line of a part may be incomplete, because its writer died.
                yield b"\n"
        for each in filter(None, drafts):
            yield b"\n" + each

    def log_state(self, path: str) -> Mapping[str, int]:
        return {name: self._size(name) for name in (*self._parts_of(path), *self._drafts_of(path))}

    def _parts_of(self, path: str) -> Sequence[str]:
        """Return a log's files in order: itself, or, if it is from object storage, those in it."""
        return sorted(self.list(path)) or [path]

    def _drafts_of(self, path: str) -> Sequence[str]:
        """Return paths of the drafts of a log, in their writers' order."""
        directory, _, name = path.rpartition("/")
        start = f"{name}{DRAFTS}"

        def found() -> Sequence[str]:
            # Skip drafts with other hard links: a draft's content is copied into the log.
            return sorted(
                f"{directory}/{each}".lstrip("/")
                for each, status in self._files.names(directory, start=start, single=True)
                if stat.S_ISREG(status.st_mode)
            )

        return self._retrying(found)

    def _pieces(self, path: str, *, single: bool = False) -> Iterator[bytes]:
        """Yield the content of a file in pieces; none if it doesn't exist."""
        start = 0

        def read() -> bytes:
            try:
                with self._files.reading(path, single=single) as file:
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
                return self._files.status(path).st_size
            except FileNotFoundError:
                return 0

        return self._retrying(size)

    def _source(self, file: Path) -> tuple[Beneath, str]:
        """Return the root and the path with which to open a local file."""
        if file.is_relative_to(self._root):
            return self._files, file.relative_to(self._root).as_posix()
        return Beneath(file.parent), file.name

    def _moved(self, source: Beneath, name: str, path: str) -> str | None:
        """Move a file without other hard links; return its digest, or None if it must be copied."""
        with source.moving(name, self._files, path) as move:
            with move.reading() as file:
                status = os.fstat(file.fileno())
                if status.st_nlink != 1 or status.st_dev != os.fstat(move.target).st_dev:
                    return None
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            try:
                move.finish()
            except OSError as error:
                # EXDEV: the same device is mounted twice.
                if error.errno != errno.EXDEV:
                    raise
                return None
            return digest

    def _created_without_links(self, path: str, data: bytes) -> bool:
        try:
            descriptor = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            _sync(file)
        return True

    def _retrying(
        self, call: Callable[[], Answer], *, syncs: bool = False, is_costly: bool = False
    ) -> Answer:
        return retry(
            call,
            retry_s=self._retry_s,
            what=f"Storage {self.root}",
            health=self._health,
            proves_health=syncs,
            is_costly=is_costly,
        )


class LocalLog:
    """Appends lines to a file, and drafts to another file beside it."""

    unsynced = 0

    def __init__(
        self, files: Beneath, path: str, drafts: str, *, retry_s: float, health: StorageHealth
    ) -> None:
        self._retry_s = retry_s
        self._health = health
        self._files = files
        self._path = path
        self._lines = _AppendedFile(files, path)
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
                self._drafts = self._retrying(lambda: _AppendedFile(self._files, self._drafts_path))
            self._drafts.unwritten += text.encode()
            self._retrying(self._drafts.write)

    def sync(self) -> None:
        self._retrying(self._lines.sync)
        self._health.has_worked()

    def __enter__(self) -> LocalLog:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._lines.close()
        finally:
            if self._drafts is not None:
                self._drafts.close()
                if not self._drafts.size:
                    self._files.delete(self._drafts_path)

    def _retrying(self, call: Callable[[], Answer]) -> Answer:
        return retry(
            call,
            retry_s=self._retry_s,
            what=str(self._files.root / self._path),
            health=self._health,
            proves_health=False,
        )


class _AppendedFile:
    """An unbuffered file: what has been written survives this process."""

    def __init__(self, files: Beneath, path: str) -> None:
        self._files = files
        self._path = path
        self._descriptor = files.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            self._end = os.fstat(self._descriptor).st_size
            self.unwritten = b"\n" if _is_torn(self._descriptor, self._end) else b""
        except BaseException:
            self.close()
            raise
        self.size = 0
        """Bytes that were written here."""

    def write(self) -> None:
        # Count what each call has written, so that a retry doesn't write it again.
        with self._reopened_after_error():
            while self.unwritten:
                written = os.write(self._descriptor, self.unwritten)
                self.unwritten = self.unwritten[written:]
                self.size += written
                self._end += written

    def empty(self) -> None:
        self.unwritten = b""
        if self.size:
            os.ftruncate(self._descriptor, 0)
            self.size = self._end = 0

    def sync(self) -> None:
        with self._reopened_after_error():
            os.fsync(self._descriptor)

    @contextmanager
    def _reopened_after_error(self) -> Iterator[None]:
        """Open the file again after an error, for the next try.

        A file server that was replaced doesn't know the open file any more. If it has lost what was
        written, the next try has to fail as well.
        """
        try:
            yield
        except OSError:
            with suppress(OSError):
                descriptor = self._files.open(self._path, os.O_RDWR | os.O_APPEND)
                try:
                    if os.fstat(descriptor).st_size >= self._end:
                        # Its number stays: another thread may be about to sync it.
                        os.dup2(descriptor, self._descriptor, inheritable=False)
                finally:
                    os.close(descriptor)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def _is_torn(descriptor: int, size: int) -> bool:
    """Return whether the last line is incomplete, because its writer died."""
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _sync(file: io.BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())
