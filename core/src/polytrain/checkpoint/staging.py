"""The directories in which a worker process stages files of a checkpoint for its agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polytrain.checkpoint.manifest import AttemptId, parse_directory_name
from polytrain.storage.beneath import Beneath

STAGING = "staging"
"""Name of the staging directory in a run whose storage is a local directory."""

_OF_RANK = "-rank_"


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
            name: name of the checkpoint's directory.
            rank: the rank.
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
    """Return the path of one rank's part of a checkpoint below a staging directory.

    Args:
        root: the staging directory.
        name: name of the checkpoint's directory.
        rank: the rank.
    """
    return root / f"{name}{_OF_RANK}{rank}"


def beneath(staged: Path) -> tuple[Beneath, str]:
    """Return the run's directory, in the storage or on the node, and a staged part's path there."""
    return Beneath(staged.parent.parent), f"{staged.parent.name}/{staged.name}"


def remove(staged: Path) -> None:
    """Delete a staged part. After an error the next attempt deletes it."""
    files, path = beneath(staged)
    with contextlib.suppress(OSError):
        files.delete_below(path)


def clear(root: Path, *, before: AttemptId) -> None:
    """Delete the staged files of earlier attempts, which have ended.

    Raises:
        OSError: they can't be listed.
    """
    files = Beneath(root.parent)
    for name, _ in files.names(root.name):
        parsed = parse_directory_name(name.partition(_OF_RANK)[0])
        if parsed is not None and parsed[1] < before:
            remove(root / name)
    # Files of another attempt may be in it.
    files.delete_empty(root.name)
