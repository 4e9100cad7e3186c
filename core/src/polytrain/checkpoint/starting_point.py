"""What an attempt resumes from: a checkpoint, or the very beginning."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    differences,
    parse_manifest,
)
from polytrain.checkpoint.staging import staged_in
from polytrain.common.errors import CheckpointError
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Files to load, and what was true when they were written."""

    location: Location | None = None
    """Where the files are; None at the beginning."""

    step: int = 0
    """Steps that lie behind."""

    own: bool = False
    """Whether it is a checkpoint of this run, rather than what the run was begun with."""

    positions: Mapping[str, Any] = field(default_factory=dict)
    """Data set → where to go on in it, as a manifest has it."""

    files: tuple[StoredFile, ...] | None = None
    """What lies there; None if nobody has written that down."""

    @property
    def path(self) -> str | None:
        """Directory or address of the files."""
        return self.location.address if self.location is not None else None


def starting_point(location: Location) -> StartingPoint:
    """Start from a checkpoint of a run, or from any files that a training function knows.

    Raises:
        OSError: there is no such directory, or it can't be read.
        ValueError: its manifest is torn, or tells of other files than are there.
    """
    storage = location.open()
    sizes = storage.list("")
    if MANIFEST_NAME not in sizes:
        if not sizes and not (location.is_local and Path(location.address).is_dir()):
            raise FileNotFoundError(f"there are no files in {location.address!r}")
        # Whoever made them by hand begins with the data at the start.
        return StartingPoint(location=location)
    manifest = parse_manifest(storage.read(MANIFEST_NAME))
    wrong = differences(manifest, sizes)
    if wrong:
        raise ValueError(f"its files aren't those that were committed: {'; '.join(wrong)}")
    return from_manifest(manifest, location, own=False)


def from_manifest(manifest: Manifest, location: Location, *, own: bool) -> StartingPoint:
    """Start from a checkpoint that lies at this location."""
    return StartingPoint(
        location=location,
        step=manifest.step,
        own=own,
        positions=manifest.positions,
        files=manifest.files,
    )


def verify(start: StartingPoint) -> None:
    """Read the files, and compare them with what was written down.

    Raises:
        CheckpointError: they differ.
        OSError: they can't be read.
    """
    if start.location is None or start.files is None:
        return
    storage = start.location.open()
    for file in start.files:
        _expect(storage.digest(file.name), file, start.location)


def brought_near(start: StartingPoint, scratch: Path) -> StartingPoint:
    """The same with its files in a directory of this node, which worker processes may read.

    Args:
        start: where the files are.
        scratch: the run's directory on this node. It is for the caller to see to it that no two
            do this at once.

    Raises:
        CheckpointError: the files aren't those that were committed.
        OSError: they can't be read.
    """
    if start.location is None or start.location.is_local:
        return start
    # Checkpoints of two runs, of which one was begun with the other's, may have the same name.
    address = hashlib.sha256(start.location.address.encode()).hexdigest()
    target = scratch / "restored" / address / start.location.name
    if not target.is_dir():
        # What was restored before isn't needed any more: no worker process is alive.
        shutil.rmtree(scratch / "restored", ignore_errors=True)
        fetch(start.location, start.files, target, near=scratch)
    return replace(start, location=Location.of(target))


def fetch(
    location: Location,
    files: tuple[StoredFile, ...] | None,
    target: Path,
    *,
    near: Path | None = None,
) -> None:
    """Copy a checkpoint's files into a new directory, which isn't there if that fails.

    Args:
        location: where they are.
        files: what must be there; None takes whatever is.
        target: the directory.
        near: where this node may still have them staged.

    Raises:
        CheckpointError: the files aren't those that were committed.
        OSError: they can't be read.
    """
    storage = location.open()
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if files is None:
        for name in storage.list(""):
            _get(storage, name, unfinished)
    else:
        for file in files:
            staged = staged_in(near, location.name, file.rank) / file.name if near else None
            if staged is None or not _taken_over(staged, file, unfinished / file.name):
                _expect(_get(storage, file.name, unfinished), file, location)
    unfinished.rename(target)


def _get(storage: Storage, name: str, directory: Path) -> str:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    return storage.get(name, file)


def _taken_over(staged: Path, file: StoredFile, target: Path) -> bool:
    """Copy a staged file, if it is there and what was committed."""
    if not staged.is_file() or staged.stat().st_size != file.size:
        return False
    # A copy: a staged file may be a link, which its writer may yet write to.
    target.parent.mkdir(parents=True, exist_ok=True)
    storage = Location.of(staged.parent).open()
    return storage.get(staged.name, target) == file.sha256


def _expect(digest: str, file: StoredFile, location: Location) -> None:
    if digest != file.sha256:
        raise CheckpointError(
            f"{file.name} in {location.address} has another content than was written: the "
            "checkpoint is damaged. Use an older one."
        )
