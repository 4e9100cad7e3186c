"""The starting point of an attempt: a checkpoint, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
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
from polytrain.errors import CheckpointError
from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import small_at_once
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage, expect_inside
from polytrain.text.described import shown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """The files to load, and the state of the run when they were written."""

    location: Location | None = None
    """Location of the files; None for a run that starts without files."""

    step: int = 0
    """Steps that are done."""

    own: bool = False
    """Whether it is this run's checkpoint, and not one that the user passed."""

    is_rescue: bool = False
    """Whether it is a survivor's state, which no report has shown to be good."""

    positions: Mapping[str, Any] = field(default_factory=dict)
    """Data set → the position to resume at, as in a manifest."""

    skipped: Mapping[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)
    """Data set → what the run leaves out of it; see `Rollback.skipped`."""

    files: tuple[StoredFile, ...] | None = None
    """The files; None without a manifest."""

    backend: str | None = None
    """Name of the backend of the run that has made them; None without a manifest."""

    virtual_workers: int | None = None
    """See `Manifest.virtual_workers`."""

    @property
    def path(self) -> str | None:
        """Directory or address of the files."""
        return self.location.address if self.location is not None else None

    @property
    def known_as(self) -> str | None:
        """A digest of the files of a run's checkpoint, which may be moved; else the path."""
        if self.files is None:
            return self.path
        named = sorted((file.name, file.sha256) for file in self.files)
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def starting_point(location: Location) -> StartingPoint:
    """Start from a checkpoint of a run, or from any files that a training function can load.

    Raises:
        OSError: there is no such directory, or it can't be read.
        ValueError: its manifest is damaged, or doesn't match the files.
    """
    storage = location.open()
    sizes = storage.list("")
    if MANIFEST_NAME not in sizes:
        if not sizes and not (location.is_local and Path(location.address).is_dir()):
            raise FileNotFoundError(f"there are no files in {location.address!r}")
        # Without a manifest there are no positions: the data starts at its beginning.
        return StartingPoint(location=location)
    manifest = parse_manifest(storage.read(MANIFEST_NAME))
    wrong = differences(manifest, sizes)
    if wrong:
        raise ValueError(f"its files differ from what was committed: {'; '.join(wrong)}")
    return from_manifest(manifest, location, own=False)


def manifest_at(location: Location) -> Manifest | None:
    """Return the manifest of a checkpoint's directory; None if it has none.

    Raises:
        CheckpointError: it is damaged.
        OSError: it can't be read.
    """
    try:
        return parse_manifest(location.open().read(MANIFEST_NAME))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(
            f"The manifest of {location.address} can't be read: {error}"
        ) from error


def from_manifest(manifest: Manifest, location: Location, *, own: bool) -> StartingPoint:
    """Start from the checkpoint at this location."""
    return StartingPoint(
        location=location,
        step=manifest.step,
        own=own,
        is_rescue=own and manifest.is_rescue,
        positions=manifest.positions,
        files=manifest.files,
        backend=manifest.backend,
        virtual_workers=manifest.virtual_workers,
    )


def verify(start: StartingPoint) -> None:
    """Read the files, and compare them with the manifest.

    Raises:
        CheckpointError: they differ.
        OSError: they can't be read.
    """
    if start.location is None or start.files is None:
        return
    storage = start.location.open()
    digests = small_at_once(
        lambda file: storage.digest(file.name), {file: file.size for file in start.files}
    )
    for file, digest in digests.items():
        _expect(digest, file, start.location)
    if start.location.is_local:
        Beneath(Path(start.location.address)).check()


def brought_near(start: StartingPoint, scratch: Path) -> StartingPoint:
    """Copy the files to this node, where worker processes can read them.

    Args:
        start: the starting point, with the files' location.
        scratch: the run's directory on this node. The caller ensures that only one process does
            this at a time.

    Raises:
        CheckpointError: the files differ from what was committed.
        OSError: they can't be read.
    """
    if start.location is None or start.location.is_local:
        return start
    # A run that starts from another run's checkpoint may have one of the same name.
    address = hashlib.sha256(start.location.address.encode()).hexdigest()
    target = scratch / "restored" / address / start.location.name
    if not _is_as_fetched(target):
        # Earlier restored files aren't needed: no worker process is alive.
        with contextlib.suppress(OSError):
            Beneath(scratch).delete_below("restored")
        fetch(start.location, start.files, target, near=scratch)
        with Beneath(target.parent).overwriting(f"{target.name}{_STAMPS}") as file:
            file.write(json.dumps(_stamps(target)).encode())
    return replace(start, location=Location.of(target))


_STAMPS = ".stamps"
"""Suffix of the file beside restored files that shows whether they have changed since."""


def _stamps(directory: Path) -> dict[str, list[int]]:
    return {
        name: [status.st_ino, status.st_size, status.st_mtime_ns]
        for name, status in Beneath(directory).files()
    }


def _is_as_fetched(target: Path) -> bool:
    """Return whether files are restored, and no training function has changed them since."""
    try:
        fetched = json.loads(Beneath(target.parent).read(f"{target.name}{_STAMPS}"))
        now = _stamps(target)
    except (OSError, ValueError):
        return False
    return all(now.get(name) == stamp for name, stamp in fetched.items())


def fetch(
    location: Location,
    files: tuple[StoredFile, ...] | None,
    target: Path,
    *,
    near: Path | None = None,
) -> None:
    """Copy a checkpoint's files into a new directory, which is created only on success.

    Args:
        files: the files to copy; None copies all.
        near: the directory in which this node may still have them staged.

    Raises:
        CheckpointError: the files differ from what was committed, or a file name leads out of
            the directory.
        OSError: they can't be read.
    """
    storage = location.open()
    near_target = Beneath(target.parent)
    unfinished = target.with_name(f".{target.name}")
    with contextlib.suppress(FileNotFoundError):
        near_target.delete_below(unfinished.name)
    with near_target.directory(unfinished.name, make=True):
        pass

    def get(file: StoredFile) -> None:
        staged = staged_in(near, location.name, file.rank) / file.name if near else None
        if staged is None or not _taken_over(staged, file, unfinished / file.name):
            _expect(_get(storage, file.name, unfinished), file, location)

    if files is None:
        small_at_once(lambda name: _get(storage, name, unfinished), storage.list(""))
    else:
        small_at_once(get, {file: file.size for file in files})
    with near_target.moving(unfinished.name, near_target, target.name) as move:
        move.finish()


def _get(storage: Storage, name: str, directory: Path) -> str:
    try:
        file = directory / expect_inside(name)
    except ValueError as error:
        raise CheckpointError(f"{error}. Remove it from the checkpoint.") from error
    return storage.get(name, file)


def _taken_over(staged: Path, file: StoredFile, target: Path) -> bool:
    """Copy a staged file; return whether it exists and is the committed one."""
    if not staged.is_file() or staged.stat().st_size != file.size:
        return False
    # Copy, don't move: a staged file may be a link, and its writer may still change it.
    storage = Location.of(staged.parent).open()
    return storage.get(staged.name, target) == file.sha256


def _expect(digest: str, file: StoredFile, location: Location) -> None:
    if digest != file.sha256:
        raise CheckpointError(
            f"{shown_name(file.name)} in {location.address} differs from what was committed: the "
            "checkpoint is damaged. Use an older one."
        )
