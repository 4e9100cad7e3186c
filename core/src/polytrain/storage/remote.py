"""Uses object storage, or any file system of Arrow or fsspec, as storage.

This needs neither renaming nor exclusive creation. It relies on one guarantee, which S3, GCS and
Azure have: a file is listed and readable once its writer has closed it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.fs as pafs

from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import StorageHealth, answered, at_once, is_refusal, retry
from polytrain.storage.local import DRAFTS
from polytrain.storage.protocol import READS_AT_MOST, copied, expect_size

Answer = TypeVar("Answer")

_SEGMENTS = 16
"""Parts of a log to hold in memory at once."""

_LARGEST_IN_S3 = 10_000 * (10 << 20)
"""Maximum bytes of a file: Arrow sends parts of 10 MiB, and S3 takes this many. It would refuse the
last parts, after hours."""

# Object stores have no directories; making one makes an empty object.
_WITHOUT_DIRECTORIES = ("s3", "gcs", "abfs")


class RemoteStorage:
    """See `Storage`. A line written to a log survives this process once it is synced."""

    is_local = False

    def __init__(
        self,
        filesystem: Any,
        base: str,
        *,
        root: str,
        retry_s: float,
        health: StorageHealth | None = None,
    ) -> None:
        """
        Args:
            filesystem: a `pyarrow.fs.FileSystem`.
            base: path of the root on it.
        """
        self.root = root
        self._filesystem = filesystem
        self._base = base.rstrip("/")
        self._retry_s = retry_s
        self._health = StorageHealth() if health is None else health

    def list(self, below: str) -> dict[str, int]:
        return self._listed(below, recursive=True)

    def _listed(self, directory: str, *, recursive: bool) -> dict[str, int]:
        def found() -> dict[str, int]:
            selector = pafs.FileSelector(
                self._path(directory), recursive=recursive, allow_not_found=True
            )
            start = len(self._base) + 1
            return {
                info.path[start:]: info.size
                for info in self._filesystem.get_file_info(selector)
                if info.type == pafs.FileType.File
            }

        return self._retrying(found)

    def read(self, path: str, *, at_most: int = READS_AT_MOST) -> bytes:
        def read() -> bytes:
            with self._filesystem.open_input_stream(self._path(path)) as stream:
                content = bytearray()
                while piece := stream.read(1 << 20):
                    content += piece
                    expect_size(path, len(content), at_most)
                return bytes(content)

        return self._retrying(read)

    def write(self, path: str, data: bytes) -> None:
        def write() -> None:
            with self._open(path) as stream:
                stream.write(data)

        self._retrying(write, size=len(data))

    def replace(self, path: str, data: bytes, *, check: Callable[[], None]) -> None:
        check()
        self.write(path, data)

    def create(self, path: str, data: bytes) -> str | None:
        # Each writer creates a file with a name of its own, and then lists the others. Of two
        # concurrent writers the later one sees the earlier one's file. If both see each other's,
        # both give way.
        own = f"{path}.{secrets.token_hex(8)}"
        directory = path.rpartition("/")[0]
        try:
            self.write(own, data)
            others = {name for name in self.list(directory) if name.startswith(path)} - {own}
        except OSError:
            # Delete it, or other writers would give way to it.
            with contextlib.suppress(OSError):
                self._answered(lambda: self._filesystem.delete_file(self._path(own)))
            raise
        if others:
            self.delete(own)
            return None
        return own

    def put(self, file: Path, path: str, *, move: bool) -> str:
        size = file.stat().st_size
        if self._filesystem.type_name == "s3" and size > _LARGEST_IN_S3:
            raise OSError(
                errno.EFBIG,
                f"it has {size:,} bytes, and Arrow writes at most {_LARGEST_IN_S3:,} to a file in "
                "S3. Divide it into several files, or pass another file system as "
                "RunConfig.storage_filesystem, such as s3fs.S3FileSystem()",
                path,
            )

        def put() -> str:
            with (
                Beneath(file.parent).reading(file.name) as reading,
                self._open(path) as writing,
            ):
                return copied(reading.read, writing.write)

        return self._retrying(put, size=size, is_costly=True)

    def get(self, path: str, file: Path) -> str:
        def get() -> str:
            with (
                self._filesystem.open_input_stream(self._path(path)) as reading,
                Beneath(file.parent).overwriting(file.name) as writing,
            ):
                return copied(reading.read, writing.write)

        return self._retrying(get, size=math.inf)

    def digest(self, path: str) -> str:
        def digest() -> str:
            with self._filesystem.open_input_stream(self._path(path)) as reading:
                return copied(reading.read, lambda _: None)

        return self._retrying(digest, size=math.inf)

    def delete(self, path: str) -> None:
        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_file(self._path(path))

        self._retrying(delete)

    def delete_below(self, directory: str) -> None:
        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_dir(self._path(directory))

        def delete_singly() -> None:
            try:
                delete()
            except OSError as error:
                if is_refusal(error) or isinstance(error, TimeoutError):
                    raise
                # Services that imitate S3 may lack its call for many objects.
                for _ in at_once(self.delete, self.list(directory)):
                    pass

        self._retrying(delete_singly)

    def open_log(self, path: str, *, series: str) -> RemoteLog:
        if not self.list(path) and (copied := self._copied_log(path)):
            # It sorts before all segments.
            self.write(f"{path}/0", b"\n".join(at_once(self.read, copied)))
            for _ in at_once(self.delete, copied):
                pass
        return RemoteLog(self, path, series)

    def read_log(self, path: str) -> Iterator[bytes]:
        segments = sorted(self.list(path)) or self._copied_log(path)
        for start in range(0, len(segments), _SEGMENTS):
            for segment in at_once(self.read, segments[start : start + _SEGMENTS]):
                yield segment
                # The last line of a segment may be incomplete, because its writer died.
                if not segment.endswith(b"\n"):
                    yield b"\n"

    def _copied_log(self, path: str) -> Sequence[str]:
        """Return the files of a log that was copied from a directory, its drafts last."""
        files = self._listed(path.rpartition("/")[0], recursive=False)
        return sorted(each for each in files if each == path or each.startswith(f"{path}{DRAFTS}"))

    def log_state(self, path: str) -> Mapping[str, int]:
        return self.list(path)

    def _path(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def _open(self, path: str) -> Any:
        if self._filesystem.type_name not in _WITHOUT_DIRECTORIES:
            self._filesystem.create_dir(self._path(path).rpartition("/")[0], recursive=True)
        return self._filesystem.open_output_stream(self._path(path))

    def _answered(self, call: Callable[[], Answer], size: float = 0) -> Answer:
        return answered(call, what=self.root, health=self._health, size=size)

    def _retrying(
        self, call: Callable[[], Answer], *, size: float = 0, is_costly: bool = False
    ) -> Answer:
        def as_os_error() -> Answer:
            try:
                return self._answered(call, size)
            except (OSError, TypeError, AttributeError, UnicodeEncodeError):
                # Of these, only an OSError may pass.
                raise
            except Exception as error:
                # fsspec's implementations raise the exceptions of their clients.
                raise OSError(f"{type(error).__name__}: {error}") from error

        return retry(
            as_os_error,
            retry_s=self._retry_s,
            what=self.root,
            health=self._health,
            is_costly=is_costly,
        )


class RemoteLog:
    """Lines in memory; each sync writes them as one more object."""

    def __init__(self, storage: RemoteStorage, path: str, series: str) -> None:
        self._storage = storage
        self._prefix = f"{path}/{series}"
        self._segments = 0
        self._lines: list[str] = []
        self.unsynced = 0
        self._syncing = threading.Lock()
        self._is_out = False

    def write(self, text: str) -> None:
        self._lines.append(text)
        self.unsynced += len(text)

    def draft(self, text: str) -> None:
        """Do nothing: no line survives this process before a sync."""

    def sync(self) -> None:
        with self._syncing:
            lines = self._lines[:]
            if not lines:
                return
            segment = f"{self._prefix}-{self._segments:06d}"
            self._is_out = True
            self._storage.write(segment, "".join(lines).encode())
            # Only after success: otherwise the next sync writes these lines.
            self._is_out = False
            self._segments += 1
            del self._lines[: len(lines)]
            self.unsynced -= sum(map(len, lines))

    def __enter__(self) -> RemoteLog:
        return self

    def __exit__(self, *_: object) -> None:
        # If the last sync has failed after all retries, don't wait again.
        if not self._is_out:
            self.sync()


def arrow_filesystem(given: Any) -> Any:
    """Return Arrow's file system for one of Arrow's or fsspec's; None for any other value."""
    if isinstance(given, pafs.PyFileSystem) and isinstance(given.handler, pafs.FSSpecHandler):
        given = given.handler.fs
    if isinstance(given, pafs.FileSystem):
        return given
    # If the value is an fsspec file system, its owner has imported fsspec. Another thread may be
    # importing it just now.
    if not isinstance(given, getattr(sys.modules.get("fsspec"), "AbstractFileSystem", ())):
        return None
    from polytrain.storage.filesystems import FsspecHandler

    return pafs.PyFileSystem(FsspecHandler(given))


def local_directory(filesystem: Any, path: str) -> Path | None:
    """Return the local directory of a path on an Arrow file system; None if it isn't local."""
    if isinstance(filesystem, pafs.SubTreeFileSystem):
        return local_directory(filesystem.base_fs, f"{filesystem.base_path}{path}")
    return Path(path).absolute() if isinstance(filesystem, pafs.LocalFileSystem) else None
