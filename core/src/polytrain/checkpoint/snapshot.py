"""What `report` waits for: a local snapshot of the files that it was given.

Large files are hard links, which takes no time whatever their size. A link shares the content with
the caller, who may write to it; to notice that, the snapshot moves the file's modification time by
a nanosecond, and whoever stores it looks whether that is still there (`is_unchanged`). A write sets
it to the kernel's clock, which stands at the old time or is milliseconds ahead, before it changes
anything; truncating does so after it, but then the size is another one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import MANIFEST_NAME

_COPIED_BELOW = 1 << 16
"""Bytes below which a copy costs hardly more than a link."""

_REMEMBERED = 4096
"""Files of earlier reports that are recognised."""

Stamp = Sequence[int]
"""A linked file's size in bytes, and the modification time that it was given, in nanoseconds."""

Stamps = Mapping[str, Stamp]
"""Name of a linked file → its stamp."""


class Snapshots:
    """Takes the snapshots of one process."""

    def __init__(self) -> None:
        self._seen: dict[Path, int] = {}
        self._stamped: dict[tuple[int, int], Stamp] = {}
        """Device and inode → the stamp that the file was given."""

    def take(self, source: Path, target: Path) -> dict[str, Stamp]:
        """Link or copy the files of a directory into another, which must be there.

        A file that the caller writes anew in place, rather than after deleting the old one, is
        copied from its second report on.

        Args:
            source: what the caller reports. Its files and their content stay as they are.
            target: an empty directory.

        Returns:
            The stamps of the files that are links.
        """
        stamps = {}
        for directory, _, names in os.walk(source, followlinks=True):
            inside = Path(directory).relative_to(source)
            (target / inside).mkdir(exist_ok=True)
            for name in names:
                # The list of files of a checkpoint that this was made from is not this one's.
                if name == MANIFEST_NAME and inside == Path():
                    continue
                file, snapshot = Path(directory, name), target / inside / name
                stamp = self._link(file, snapshot)
                if stamp is None:
                    shutil.copyfile(file, snapshot)
                else:
                    stamps[(inside / name).as_posix()] = stamp
        _forget_the_oldest(self._seen)
        _forget_the_oldest(self._stamped)
        return stamps

    def _link(self, file: Path, target: Path) -> Stamp | None:
        """Make a link, and return its stamp; None if a copy has to do."""
        status = file.stat()
        rewritten = self._seen.pop(file, None) == status.st_ino
        self._seen[file] = status.st_ino
        if rewritten or status.st_size < _COPIED_BELOW:
            return None
        identity = status.st_dev, status.st_ino
        # A file with several names, or one that several reports share, keeps the stamp that it has.
        keeps = self._stamped.pop(identity, None) == (status.st_size, status.st_mtime_ns)
        time = status.st_mtime_ns + (0 if keeps else 1)
        stamp = status.st_size, time
        try:
            os.link(file.resolve(), target)
            if not keeps:
                os.utime(target, ns=(status.st_atime_ns, time))
            if is_unchanged(target.stat(), stamp):
                self._stamped[identity] = stamp
                return stamp
        except OSError:
            # Another file system, or one without links, or somebody else's file.
            pass
        # Or times are too coarse to tell.
        target.unlink(missing_ok=True)
        return None


def file_names(source: Path) -> list[str]:
    """Names of the files that a snapshot of this directory would hold, relative to it."""
    names = [
        Path(directory, name).relative_to(source).as_posix()
        for directory, _, files in os.walk(source, followlinks=True)
        for name in files
    ]
    return sorted(name for name in names if name != MANIFEST_NAME)


def _forget_the_oldest(known: dict[Any, Any]) -> None:
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]


def is_unchanged(status: os.stat_result, stamp: Stamp | None) -> bool:
    """Whether nobody has written to a file since its snapshot; a copy has no stamp."""
    return stamp is None or (status.st_size, status.st_mtime_ns) == tuple(stamp)
