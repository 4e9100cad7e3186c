"""Local snapshots of reported files, in directories from which the agent takes them.

`report` waits for the snapshot only.

Large files become hard links, which take no time whatever the size. A link shares its content with
the caller, who may write to it. To notice a write, the snapshot sets the file's modification time
back, to a time that doesn't depend on who sets it: several ranks may report the same file. The
agent checks for this time when it stores the file (`is_unchanged`). A write sets the time to the
kernel's clock, which is at the old time or ahead, before it changes the content. Truncating sets it
afterwards, but also changes the size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

from polytrain.checkpoint.manifest import MANIFEST_NAME, AttemptId, parse_directory_name
from polytrain.checkpoint.scratch import OF_RUN, make_again
from polytrain.storage.beneath import Beneath

logger = logging.getLogger(__name__)

STAGING = "staging"
"""Name of the staging directory in a run whose storage is a local directory."""

COPIES = "copies"
"""Name of the directory, in a run's directory on a node, with copies of the training's state."""

_OF_RANK = "-rank_"

_GONE = "-gone"
"""Suffix of the names of parts that are being deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stagings:
    """The staging directories that a worker process chooses from."""

    scratch: Path
    """The run's directory on the node."""

    near: Path | None
    """A directory in the storage, if that is local: files are moved from there, not copied."""

    def new(self, name: str, rank: int, *, source: Path | None = None) -> Path:
        """Create an empty directory for one rank's part of a checkpoint.

        Args:
            source: the files' directory, to choose a file system where they can be linked, also
                through symbolic links; None for files that aren't written yet.
        """
        root = self._root(source)
        staging = staged_in(root, name, rank)
        files, path = beneath(staging)
        # A report that raised may have left files with the same number.
        files.delete_below(path)
        with files.directory(path, make=True):
            return staging

    def _root(self, source: Path | None) -> Path:
        make_again(self.scratch)
        if self.near is None:
            return self.scratch
        with Beneath(self.near.parent).directory(self.near.name, make=True) as near:
            device_of_near = os.fstat(near).st_dev
        # Files in the scratch directory may vanish: the agent moves checkpoints out of it.
        device = self.scratch.stat().st_dev if source is None else _device_of(source)
        return self.near if device_of_near == device else self.scratch


def _device_of(source: Path) -> int:
    """Return the device of the directory's largest file; its own if it has no files."""
    return max(_statuses(source), key=lambda each: each.st_size, default=source.stat()).st_dev


def _statuses(source: Path) -> Iterator[os.stat_result]:
    for directory, _, names in os.walk(source, followlinks=True):
        for name in names:
            # A library may still remove temporary files. A needed file that is missing is
            # reported later, by name.
            with contextlib.suppress(FileNotFoundError):
                yield Path(directory, name).stat()


def staged_in(root: Path, name: str, rank: int) -> Path:
    """Return the path of one rank's part of a checkpoint below a staging directory."""
    return root / f"{name}{_OF_RANK}{rank}"


def beneath(staged: Path) -> tuple[Beneath, str]:
    """Return the run's directory, in the storage or on the node, and a staged part's path there."""
    return Beneath(staged.parent.parent), f"{staged.parent.name}/{staged.name}"


def size_of(staged: Path) -> int:
    """Return how many bytes a staged part has; 0 if it can't be read."""
    files, path = beneath(staged)
    with contextlib.suppress(OSError):
        return sum(status.st_size for _, status in files.files(path))
    return 0


def link(staged: Path, target: Path) -> None:
    """Give all of a staged part's files other names, which stay when it is deleted.

    Another process may delete the part with `remove` meanwhile. After an error no target is left.

    Args:
        staged: the part.
        target: a directory of the same run on the same node.

    Raises:
        FileNotFoundError: the part is gone.
        OSError: the file system has no links, or is full.
    """
    root, below = beneath(staged)
    other, new = beneath(target)
    try:
        for path, _ in root.files(below):
            directory, _, name = f"{new}/{path.removeprefix(f'{below}/')}".rpartition("/")
            with other.directory(directory, make=True) as to:
                os.link(root.root / path, name, dst_dir_fd=to, follow_symlinks=False)
        # If it is still there, no file was missing.
        root.status(below)
    except OSError:
        remove(target)
        raise


def remove(staged: Path) -> None:
    """Delete a staged part, which is gone at once. After an error the next attempt deletes it.

    It gets another name first: who finds it under its own finds all of its files.
    """
    files, path = beneath(staged)
    gone = f"{path}{_GONE}"
    with contextlib.suppress(OSError):
        files.delete_below(gone)
        with files.directory(staged.parent.name) as directory:
            name = staged.name
            os.rename(name, f"{name}{_GONE}", src_dir_fd=directory, dst_dir_fd=directory)
        files.delete_below(gone)


def kept_aside(staged: Path) -> Path | None:
    """Move a staged part to where no run deletes it: it can't be stored. Return its new place.

    Only the newest of a rank is kept.

    Returns:
        None if it isn't on this node's disk, or is gone.
    """
    place = _aside(staged)
    if place is None or any(_age(other) > _age(staged) for other in _kept_of_rank(staged)):
        return None
    kept = place / staged.name
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        staged.rename(kept)
    except OSError as error:
        # The thread that stores it may have moved it meanwhile.
        if not kept.is_dir():
            logger.warning("The files in %s can't be kept: %s", staged, error)
            return None
    for other in _kept_of_rank(staged):
        if other != kept:
            remove(other)
    return kept


def forget_aside(staged: Path) -> None:
    """Delete the parts of the same rank that were kept aside: this one, not older, is stored."""
    for other in _kept_of_rank(staged):
        if _age(other) <= _age(staged):
            remove(other)
    place = _aside(staged)
    if place is not None:
        with contextlib.suppress(OSError):  # it isn't there, or other ranks' parts are in it
            place.rmdir()


def _kept_of_rank(staged: Path) -> list[Path]:
    """Return the parts of the same rank that were kept aside."""
    place, of_rank = _aside(staged), f"{_OF_RANK}{staged.name.partition(_OF_RANK)[2]}"
    if place is None or not place.is_dir():
        return []
    return [other for other in place.iterdir() if other.name.endswith(of_rank)]


def _age(staged: Path) -> tuple[int, ...]:
    """Return what orders the parts of a rank, the newest last."""
    found = parse_directory_name(staged.name.partition(_OF_RANK)[0])
    return () if found is None else (found[1].token, found[1].attempt, found[0])


def _aside(staged: Path) -> Path | None:
    """Return the directory beside a run's on this node, for what can't be stored."""
    run = staged.parent
    return run.with_name(f"unstored-{run.name}") if run.name.startswith(OF_RUN) else None


def clear(root: Path, *, before: AttemptId) -> None:
    """Delete the staged files of earlier attempts, which have ended. The directory itself stays:
    another rank may be making one of its own in it.

    Raises:
        OSError: they can't be listed.
    """
    for name, _ in Beneath(root.parent).names(root.name):
        parsed = parse_directory_name(name.partition(_OF_RANK)[0])
        if parsed is not None and parsed[1] < before:
            remove(root / name)


def clear_of_rank(root: Path, of: AttemptId, rank: int, spared: Container[Path]) -> None:
    """Delete what a rank's process, which has ended, has staged. An error is ignored."""
    with contextlib.suppress(OSError):
        for name, _ in Beneath(root.parent).names(root.name):
            directory, _, its_rank = name.partition(_OF_RANK)
            parsed = parse_directory_name(directory)
            is_own = parsed is not None and parsed[1] == of and its_rank == f"{rank}"
            if is_own and root / name not in spared:
                remove(root / name)


def remove_with_root(root: Path, *, before: AttemptId) -> None:
    """Delete the staged files of earlier attempts, and the directory if no others are in it.

    Raises:
        OSError: they can't be listed.
    """
    clear(root, before=before)
    Beneath(root.parent).delete_empty(root.name)


_COPIED_BELOW = 1 << 16
"""Files below this size in bytes are copied, which costs hardly more than a link."""

_REMEMBERED = 4096
"""Number of files of earlier reports to remember."""

_TICK_NS = 1000
"""Nanoseconds to which a snapshot rounds a file's time down: too few for a write in between."""

Stamp = Sequence[int]
"""A linked file's size in bytes, and the modification time that was set, in nanoseconds."""

Stamps = Mapping[str, Stamp]
"""Name of a linked file → its stamp."""


class Snapshots:
    """Takes the snapshots of one process."""

    def __init__(self) -> None:
        self._seen: dict[Path, int] = {}
        """File → the inode that it had in its last report."""

    def take(self, source: Path, target: Path) -> dict[str, Stamp]:
        """Link or copy the files of a directory into another, existing one.

        A file that the caller rewrites in place, without deleting it first, is copied from its
        second report on.

        Args:
            source: the reported directory. Its files keep their content.
            target: an empty directory.

        Returns:
            The stamps of the linked files.

        Raises:
            OSError: a file or a directory can't be read.
        """
        stamps, seen = {}, dict[Path, int]()
        # What can't be listed would be missing in the checkpoint without a word.
        for directory, _, names in os.walk(source, onerror=_raised, followlinks=True):
            inside = Path(directory).relative_to(source)
            below = "" if inside == Path() else inside.as_posix()
            with Beneath(target).directory(below, make=True) as descriptor:
                for name in names:
                    # The manifest of the checkpoint that was loaded doesn't describe this one.
                    if name == MANIFEST_NAME and inside == Path():
                        continue
                    file = Path(directory, name)
                    status = file.stat()
                    seen[file] = status.st_ino
                    is_rewritten = self._seen.get(file) == status.st_ino
                    stamp = None if is_rewritten else _linked(file, status, name, descriptor)
                    if stamp is None:
                        _copy(file, name, descriptor)
                    else:
                        stamps[(inside / name).as_posix()] = stamp
        # Only now: one that fails may be taken again.
        self._seen = {file: inode for file, inode in self._seen.items() if file not in seen} | seen
        self._seen = dict(islice(self._seen.items(), max(0, len(self._seen) - _REMEMBERED), None))
        return stamps


def _raised(error: OSError) -> NoReturn:
    raise error


def _linked(file: Path, status: os.stat_result, name: str, directory: int) -> Stamp | None:
    """Link a file into an open directory; return its stamp, or None if it must be copied."""
    if status.st_size < _COPIED_BELOW:
        return None
    # A coarser file system can't hold this time: there, files are copied.
    time = status.st_mtime_ns // _TICK_NS * _TICK_NS + 1
    stamp = status.st_size, time
    try:
        os.link(file.resolve(), name, dst_dir_fd=directory)
        if time != status.st_mtime_ns:
            times = (status.st_atime_ns, time)
            os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)
        made = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if is_unchanged(made, stamp):
            return stamp
    except OSError:
        # It is on another file system, on one without links, or another user's.
        pass
    # This is also reached if the file system can't hold the time.
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


def is_unchanged(status: os.stat_result, stamp: Stamp | None) -> bool:
    """Return whether a file hasn't changed since its snapshot; a copy has no stamp."""
    return stamp is None or (status.st_size, status.st_mtime_ns) == tuple(stamp)
