"""Where a run's checkpoints lie, and the protocol by which they come to be.

1. A worker process puts its files into a staging directory on its node.
2. `store_part`: its agent stores them in the checkpoint's directory, and notes sizes and hashes.
3. `commit`: once all parts are there, the manifest is written. That is the commit.

Each step may be the last thing that a process does: what has no manifest is no checkpoint. Nothing
is renamed but single files, so object storage will do; and no two attempts write to the same
directory, so what a process does that was taken for dead does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import (
    MANIFEST_NAME,
    AttemptId,
    Manifest,
    StoredFile,
    UnknownFormatError,
    differences,
    parse_directory_name,
    parse_manifest,
)
from polytrain.checkpoint.snapshot import Stamps, is_unchanged
from polytrain.checkpoint.staging import STAGING, clear
from polytrain.common.errors import CheckpointError
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain.storage.retry import retry

_CHECKPOINTS = "checkpoints"

_SHOWN_WITHIN_S = 60.0
"""What another node has written is seen on a network file system after this, at the latest."""

_READERS = 16
"""Manifests that are read at a time; object storages take their time for each."""


class SnapshotChangedError(Exception):
    """The caller has written to a reported file before it was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies in a run's storage."""

    manifests: tuple[Manifest, ...]
    """Of the checkpoints whose files are all there, with the right sizes; the oldest first."""

    damaged: Mapping[str, str]
    """Directory → what is wrong with it, of those that were committed and are no checkpoints."""

    uncommitted: tuple[str, ...]
    """Directories without a manifest."""


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one run. Knows only where they are, so it travels to every process."""

    location: Location
    """The run's."""

    @cached_property
    def _storage(self) -> Storage:
        return self.location.open()

    def __reduce__(self) -> tuple[Any, ...]:
        # Every process opens the storage for itself.
        return _store_at, (self.location,)

    def location_of(self, directory: str) -> Location:
        """Where a checkpoint lies."""
        return self.checkpoints.below(directory)

    @property
    def checkpoints(self) -> Location:
        """Where all of them lie."""
        return self.location.below(_CHECKPOINTS)

    @property
    def near_staging(self) -> Path | None:
        """Where a worker process may stage files on the storage's own file system."""
        return Path(self.location.address, STAGING) if self.location.is_local else None

    def store_part(
        self, directory: str, rank: int, staged: Path, stamps: Stamps
    ) -> tuple[StoredFile, ...]:
        """Store what one rank has staged in a checkpoint's directory.

        Args:
            directory: the checkpoint's.
            rank: whose part it is.
            staged: the staging directory; its files may be moved.
            stamps: of the files that are links, as `Snapshots.take` returned them.

        Raises:
            SnapshotChangedError: a file was written to since it was staged.
            CheckpointError: nothing was staged, or a file of the manifest's name.
            OSError: the storage refused.
        """
        if not staged.is_dir():
            raise CheckpointError(f"Rank {rank} has nothing staged for {directory}.")
        if (staged / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"A checkpoint's manifest is called {MANIFEST_NAME}; give your file another name."
            )
        stored = []
        for file in sorted(path for path in staged.rglob("*") if path.is_file()):
            name = file.relative_to(staged).as_posix()
            with file.open("rb") as opened:
                digest = self._storage.put(file, f"{_CHECKPOINTS}/{directory}/{name}", move=True)
                # By its descriptor: it may have another name by now.
                status = os.fstat(opened.fileno())
            if not is_unchanged(status, stamps.get(name)):
                raise SnapshotChangedError(
                    f"{name!r} was written to before it was stored. Write each checkpoint's files "
                    "into a new directory, or report with upload='sync'"
                )
            stored.append(StoredFile(name=name, size=status.st_size, sha256=digest, rank=rank))
        return tuple(stored)

    def commit(self, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        """Write the manifest, if the files are there that it tells of.

        Returns:
            The stamps of the checkpoint's files.

        Raises:
            CheckpointError: it isn't there afterwards.
            OSError: the files aren't there, or the storage refused.
        """
        retry(
            lambda: self._expect_files(manifest),
            retry_s=min(self.location.retry_s, _SHOWN_WITHIN_S),
            what=manifest.directory,
        )
        path = f"{_CHECKPOINTS}/{manifest.directory}/{MANIFEST_NAME}"
        text = manifest.to_json().encode()
        self._storage.write(path, text)
        stamps = self.stamps(manifest)
        if not self.location.is_local and stamps[MANIFEST_NAME] != (len(text),):
            # Older checkpoints are deleted for this one.
            stored = max(0, *stamps[MANIFEST_NAME])
            raise CheckpointError(
                f"The storage has {stored} bytes instead of {len(text)} of {path}, and has said "
                "that it wrote them"
            )
        return stamps

    def find(self, *, since_token: int) -> Found:
        """Read the index: all manifests, and which of them the files agree with.

        Args:
            since_claim: drivers' leases below this one are of a run that was started over.

        Raises:
            CheckpointError: another version has written some of them.
            OSError: the storage refused.
        """
        files: dict[str, dict[str, int]] = {}
        for path, size in self._storage.list(_CHECKPOINTS).items():
            directory, _, name = path.removeprefix(f"{_CHECKPOINTS}/").partition("/")
            files.setdefault(directory, {})[name] = size
        own = [name for name in files if _is_since(name, since_token)]
        committed = [name for name in own if MANIFEST_NAME in files[name]]
        read = dict(zip(committed, self._read_all(committed), strict=True))
        damaged = {name: told for name, told in read.items() if isinstance(told, str)}
        manifests = []
        for name, manifest in read.items():
            if isinstance(manifest, Manifest):
                wrong = differences(manifest, files[name])
                if wrong:
                    damaged[name] = "; ".join(wrong)
                else:
                    manifests.append(manifest)
        return Found(
            manifests=tuple(sorted(manifests, key=lambda m: (m.attempt_id, m.number))),
            damaged=damaged,
            uncommitted=tuple(name for name in own if name not in read),
        )

    def damage(self, manifest: Manifest) -> tuple[str, ...]:
        """What is missing or has changed since the commit; empty if all is intact.

        Reads all of the checkpoint's files.

        Raises:
            OSError: the storage refused.
        """
        read = self._read(manifest.directory)
        if isinstance(read, str):
            return (read,)
        wrong = differences(manifest, self._sizes(manifest.directory))
        return wrong or tuple(
            f"{file.name} has another content than was written"
            for file in manifest.files
            if self._digest(manifest, file) != file.sha256
        )

    def stamps(self, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        """What changes whenever one of a checkpoint's files does, as far as the storage tells.

        On a file system everything does; of objects only the sizes are compared.
        """
        names = [MANIFEST_NAME, *(file.name for file in manifest.files)]
        if not self.location.is_local:
            sizes = self._sizes(manifest.directory)
            return {name: (sizes.get(name, -1),) for name in names}
        root = Path(self.location_of(manifest.directory).address)
        try:
            statuses = {name: (root / name).stat() for name in names}
        except FileNotFoundError:
            return {}
        return {
            name: (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            for name, status in statuses.items()
        }

    def delete(self, directory: str) -> None:
        """Delete a checkpoint; its manifest first, so that no reader takes what is left for one.

        Raises:
            OSError: the storage refused.
        """
        self._storage.delete(f"{_CHECKPOINTS}/{directory}/{MANIFEST_NAME}")
        self._storage.delete_below(f"{_CHECKPOINTS}/{directory}")

    def sweep(self, *, before: AttemptId) -> None:
        """Delete what earlier attempts, which are over, have never committed.

        Raises:
            OSError: the storage refused.
        """
        paths = [path.split("/") for path in self._storage.list(_CHECKPOINTS)]
        committed = {path[1] for path in paths if path[2:] == [MANIFEST_NAME]}
        names = {path[1] for path in paths}
        if self.location.is_local:
            # No path tells of a directory in which nothing has been finished.
            names |= {path.name for path in Path(self.location.address, _CHECKPOINTS).glob("*")}
        for name in names - committed:
            parsed = parse_directory_name(name)
            if parsed is not None and parsed[1] < before:
                self._storage.delete_below(f"{_CHECKPOINTS}/{name}")

    def clear_staging(self, *, before: AttemptId) -> None:
        """Delete what workers of earlier attempts, which are over, have staged in the storage."""
        if self.near_staging is not None:
            clear(self.near_staging, before=before)

    def _expect_files(self, manifest: Manifest) -> None:
        lacking = differences(manifest, self._sizes(manifest.directory))
        if lacking:
            place = self.location_of(manifest.directory).address
            raise OSError(
                f"what the workers have stored isn't in {place} ({'; '.join(lacking[:3])}): is "
                "RunConfig.storage_path on a file system that all nodes mount?"
            )

    def _sizes(self, directory: str) -> dict[str, int]:
        root = f"{_CHECKPOINTS}/{directory}"
        return {
            path.removeprefix(f"{root}/"): size for path, size in self._storage.list(root).items()
        }

    def _read_all(self, directories: Sequence[str]) -> Iterable[Manifest | str]:
        if self.location.is_local:
            return map(self._read, directories)
        with ThreadPoolExecutor(_READERS) as readers:
            return readers.map(self._read, directories)

    def _read(self, directory: str) -> Manifest | str:
        try:
            manifest = parse_manifest(
                self._storage.read(f"{_CHECKPOINTS}/{directory}/{MANIFEST_NAME}")
            )
        except UnknownFormatError as error:
            # What can't be read isn't damaged, and mustn't be deleted as if it were.
            place = self.location_of(directory).address
            raise CheckpointError(
                f"{place} was written by another version of polytrain ({error}). Go on with that "
                "one, or call fit(resume='never')."
            ) from error
        except (FileNotFoundError, ValueError) as error:
            return f"its manifest can't be read: {error}"
        return manifest if manifest.directory == directory else "its manifest is another one's"

    def _digest(self, manifest: Manifest, file: StoredFile) -> str:
        try:
            return self._storage.digest(f"{_CHECKPOINTS}/{manifest.directory}/{file.name}")
        except FileNotFoundError:
            return ""


def _store_at(location: Location) -> CheckpointStore:
    return CheckpointStore(location=location)


def _is_since(directory: str, token: int) -> bool:
    parsed = parse_directory_name(directory)
    return parsed is not None and parsed[1].token >= token
