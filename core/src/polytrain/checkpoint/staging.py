"""Where a worker process puts the files of a checkpoint, for its agent to store."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polytrain.checkpoint.manifest import AttemptId, parse_directory_name

STAGING = "staging"
"""Directory of a run for this, where its storage is a directory."""

_OF_RANK = "-rank_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stagings:
    """The directories that a worker process may choose from."""

    scratch: Path
    """On the node."""

    near: Path | None
    """In the storage, if that is a directory: from there files needn't be copied."""

    def new(self, name: str, rank: int, *, source: Path | None = None) -> Path:
        """An empty directory for the part of one rank of a checkpoint.

        Args:
            name: of the checkpoint's directory.
            rank: whose part.
            source: where the files come from, so that they can be linked if anywhere, also if it
                has symbolic links to them; None for files that are still to be written.
        """
        root = self._root(source)
        staging = staged_in(root, name, rank)
        # A report that raised may have left something of the same number.
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def _root(self, source: Path | None) -> Path:
        if self.near is None:
            return self.scratch
        self.near.mkdir(parents=True, exist_ok=True)
        # What is in the scratch directory comes and goes: the agent stores checkpoints from there.
        device = self.scratch.stat().st_dev if source is None else _device_of(source)
        return self.near if self.near.stat().st_dev == device else self.scratch


def _device_of(source: Path) -> int:
    """The file system of the largest of its files; its own if it has none."""
    return max(_statuses(source), key=lambda each: each.st_size, default=source.stat()).st_dev


def _statuses(source: Path) -> Iterator[os.stat_result]:
    for directory, _, names in os.walk(source, followlinks=True):
        for name in names:
            # A library may still remove files of its own. One that is needed is missed later, by
            # its name.
            with contextlib.suppress(FileNotFoundError):
                yield Path(directory, name).stat()


def staged_in(root: Path, name: str, rank: int) -> Path:
    """Where the part of one rank of a checkpoint is below a staging directory.

    Args:
        root: the staging directory.
        name: of the checkpoint's directory.
        rank: whose part.
    """
    return root / f"{name}{_OF_RANK}{rank}"


def clear(root: Path, *, before: AttemptId) -> None:
    """Delete what worker processes of earlier attempts, which are over, have left staged."""
    for staged in root.glob("*"):
        parsed = parse_directory_name(staged.name.partition(_OF_RANK)[0])
        if parsed is not None and parsed[1] < before:
            shutil.rmtree(staged, ignore_errors=True)
    # Another attempt's may be in it.
    with contextlib.suppress(OSError):
        root.rmdir()
