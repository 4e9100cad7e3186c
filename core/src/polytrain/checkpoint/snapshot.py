"""Local snapshots of reported files. `report` waits for the snapshot only.

Large files become hard links, which take no time whatever the size. A link shares its content with
the caller, who may write to it. To notice a write, the snapshot moves the file's modification time
by a nanosecond, and the agent checks for this time when it stores the file (`is_unchanged`). A
write sets the time to the kernel's clock, which is at the old time or milliseconds ahead, before it
changes the content. Truncating sets it afterwards, but also changes the size.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.storage.beneath import Beneath

_COPIED_BELOW = 1 << 16
"""Files below this size in bytes are copied, which costs hardly more than a link."""

_REMEMBERED = 4096
"""Number of files of earlier reports to remember."""

Stamp = Sequence[int]
"""A linked file's size in bytes, and the modification time that was set, in nanoseconds."""

Stamps = Mapping[str, Stamp]
"""Name of a linked file → its stamp."""


class Snapshots:
    """Takes the snapshots of one process."""

    def __init__(self) -> None:
        self._seen: dict[Path, int] = {}
        self._stamped: dict[tuple[int, int], Stamp] = {}
        """Device and inode → the stamp that was set."""

    def take(self, source: Path, target: Path) -> dict[str, Stamp]:
        """Link or copy the files of a directory into another, existing one.

        A file that the caller rewrites in place, without deleting it first, is copied from its
        second report on.

        Args:
            source: the reported directory. Its files keep their content.
            target: an empty directory.

        Returns:
            The stamps of the linked files.
        """
        stamps = {}
        for directory, _, names in os.walk(source, followlinks=True):
            inside = Path(directory).relative_to(source)
            below = "" if inside == Path() else inside.as_posix()
            with Beneath(target).directory(below, make=True) as descriptor:
                for name in names:
                    # The manifest of the checkpoint that was loaded doesn't describe this one.
                    if name == MANIFEST_NAME and inside == Path():
                        continue
                    file = Path(directory, name)
                    stamp = self._link(file, name, descriptor)
                    if stamp is None:
                        _copy(file, name, descriptor)
                    else:
                        stamps[(inside / name).as_posix()] = stamp
        _forget_the_oldest(self._seen)
        _forget_the_oldest(self._stamped)
        return stamps

    def _link(self, file: Path, name: str, directory: int) -> Stamp | None:
        """Link a file into an open directory; return its stamp, or None if it must be copied."""
        status = file.stat()
        rewritten = self._seen.pop(file, None) == status.st_ino
        self._seen[file] = status.st_ino
        if rewritten or status.st_size < _COPIED_BELOW:
            return None
        identity = status.st_dev, status.st_ino
        # A file with several names, or in several reports, keeps its stamp.
        keeps = self._stamped.pop(identity, None) == (status.st_size, status.st_mtime_ns)
        time = status.st_mtime_ns + (0 if keeps else 1)
        stamp = status.st_size, time
        try:
            os.link(file.resolve(), name, dst_dir_fd=directory)
            if not keeps:
                times = (status.st_atime_ns, time)
                os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)
            made = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if is_unchanged(made, stamp):
                self._stamped[identity] = stamp
                return stamp
        except OSError:
            # It is on another file system, on one without links, or another user's.
            pass
        # This is also reached if the file system's times are too coarse.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        return None


def _copy(file: Path, name: str, directory: int) -> None:
    # O_EXCL: a file of this name can only be somebody else's.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=directory)
    try:
        # `copyfile` takes only paths; it copies as fast as this file system can.
        shutil.copyfile(file, f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _forget_the_oldest(known: dict[Any, Any]) -> None:
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]


def is_unchanged(status: os.stat_result, stamp: Stamp | None) -> bool:
    """Return whether a file hasn't changed since its snapshot; a copy has no stamp."""
    return stamp is None or (status.st_size, status.st_mtime_ns) == tuple(stamp)
