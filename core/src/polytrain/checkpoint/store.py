"""Stores a run's checkpoints, and commits them by a protocol.

1. A worker process puts its files into a staging directory on its node.
2. `store_part`: its agent stores them in the checkpoint's directory, with sizes and hashes.
3. `commit`: once all parts are stored, the driver writes the manifest. That is the commit.

A process may die after any step: a directory without a manifest isn't a checkpoint. Only single
files are renamed, so object storage works. Every attempt writes to its own directories, so a
process that was mistaken for dead can do no harm.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

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
from polytrain.checkpoint.staging import STAGING, Stamps, beneath, is_unchanged, remove_with_root
from polytrain.errors import CheckpointError
from polytrain.storage.beneath import Beneath, ForeignFileError
from polytrain.storage.calls import at_once, retry, small_at_once
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage, storage_errors
from polytrain.text.described import shown_name

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

CHECKPOINTS = "checkpoints"

_SHOWN_WITHIN_S = 60.0
"""Longest time until a network file system shows files that another node wrote."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


class SnapshotChangedError(Exception):
    """The caller wrote to a reported file before the agent stored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """The outcome of storing one rank's part."""

    files: tuple[StoredFile, ...]
    left_out: tuple[str, ...] = ()
    """Files that differ from rank 0's file of the same name, which is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoints:
    """The checkpoint directories in a run's storage."""

    manifests: tuple[Manifest, ...]
    """Manifests of the checkpoints whose files all exist with the right sizes, oldest first."""

    damaged: Mapping[str, str]
    """Directory of a damaged checkpoint → description of the damage."""

    def lacks(self, directory: str) -> bool:
        """Return whether a checkpoint is gone that no newer one has replaced.

        Args:
            directory: directory of the newest checkpoint that is known to be committed.
        """
        parsed = parse_directory_name(directory)
        if parsed is None or directory in self.damaged:
            return False
        number, made_by = parsed
        return all((each.attempt_id, each.number) < (made_by, number) for each in self.manifests)


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one run. It holds only a location, so it can be sent to every process.

    All that touches the storage raises OSError if that fails.
    """

    location: Location

    @cached_property
    def _storage(self) -> Storage:
        return self.location.open()

    @property
    def _files(self) -> Beneath:
        """The files of a run that is stored in a directory."""
        return Beneath(Path(self.location.address))

    def __reduce__(self) -> tuple[Any, ...]:
        # Every process opens the storage itself.
        return partial(CheckpointStore, location=self.location), ()

    def location_of(self, directory: str) -> Location:
        """Return the location of a checkpoint."""
        return self.checkpoints.below(directory)

    @property
    def checkpoints(self) -> Location:
        """The location of all checkpoints."""
        return self.location.below(CHECKPOINTS)

    @property
    def near_staging(self) -> Path | None:
        """The staging directory on the storage's own file system; None for object storage."""
        return Path(self.location.address, STAGING) if self.location.is_local else None

    def store_part(
        self,
        directory: str,
        rank: int,
        staged: Path,
        stamps: Stamps,
        *,
        stored_already: Mapping[str, str] = _NOTHING,
    ) -> StoredPart:
        """Store one rank's staged files in a checkpoint's directory.

        Args:
            staged: the staging directory; its files may be moved.
            stamps: stamps of the linked files, as `Snapshots.take` returned them.
            stored_already: name → SHA-256 of the files that rank 0 has stored. They are compared,
                and never replaced.

        Raises:
            SnapshotChangedError: a file that rank 0 hasn't stored was written to after it was
                staged.
            CheckpointError: nothing was staged, or a file has the manifest's name.
            OSError: the storage failed, or something else than files was staged.
        """
        files, below = beneath(staged)
        try:
            sizes = {
                path.removeprefix(f"{below}/"): status.st_size
                for path, status in files.files(below, expects_own=True)
            }
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"Rank {rank} has nothing staged for {directory}.") from error
        if MANIFEST_NAME in sizes:
            raise CheckpointError(
                f"A checkpoint's manifest is called {MANIFEST_NAME}; give your file another name."
            )

        def store(name: str) -> StoredFile:
            path = f"{CHECKPOINTS}/{directory}/{name}"
            with files.reading(f"{below}/{name}") as opened:
                if name in stored_already:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                else:
                    digest = self._storage.put(staged / name, path, move=True)
                # Use the descriptor: the file may have been moved.
                status = os.fstat(opened.fileno())
            if not is_unchanged(status, stamps.get(name)):
                if name not in stored_already:
                    # Nobody may take it for what was reported, if the checkpoint itself is kept.
                    self._storage.delete(path)
                    raise SnapshotChangedError(
                        f"{name!r} was written to before it was stored. Write each checkpoint's "
                        "files into a new directory, or report with upload='sync'"
                    )
                # Rank 0's file is kept, and nothing shows any more that this one differed.
                digest = stored_already[name]
            return StoredFile(name=name, size=status.st_size, sha256=digest, rank=rank)

        stored = small_at_once(store, sizes)
        read = [stored[name] for name in sorted(stored)]
        return StoredPart(
            files=tuple(each for each in read if each.name not in stored_already),
            left_out=tuple(
                each.name
                for each in read
                if stored_already.get(each.name, each.sha256) != each.sha256
            ),
        )

    def find_part(
        self, directory: str, rank: int, *, stored_already: Mapping[str, str] = _NOTHING
    ) -> StoredPart:
        """Read and hash the files that a training function has written to a checkpoint's directory.

        Args:
            stored_already: files of rank 0's part, which aren't read again.

        Raises:
            CheckpointError: there are none, or one has the manifest's name.
        """
        sizes = self._sizes(directory)
        if not sizes:
            place = self.location_of(directory).address
            raise CheckpointError(
                f"Rank {rank} has reported what it has written to {place}, which has no files."
            )
        # Once rank 0's files are stored, the manifest may be there: they may have been committed.
        if sizes.pop(MANIFEST_NAME, None) is not None and not stored_already:
            raise CheckpointError(
                f"A checkpoint's manifest is called {MANIFEST_NAME}; give your file another name."
            )
        digests = small_at_once(
            lambda name: self._storage.digest(f"{CHECKPOINTS}/{directory}/{name}"),
            {name: size for name, size in sizes.items() if name not in stored_already},
        )
        files = (
            StoredFile(name=name, size=sizes[name], sha256=digests[name], rank=rank)
            for name in sorted(digests)
        )
        return StoredPart(files=tuple(files))

    def commit(self, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        """Write the manifest, if its files are stored.

        Returns:
            The stamps of the checkpoint's files.

        Raises:
            CheckpointError: the storage lost the manifest or files during this call.
            OSError: files are missing, or the storage failed.
        """
        retry(
            lambda: self._expect_files(manifest),
            retry_s=min(self.location.retry_s, _SHOWN_WITHIN_S),
            what=manifest.directory,
            health=self.location.health,
            proves_health=False,
        )
        path = f"{CHECKPOINTS}/{manifest.directory}/{MANIFEST_NAME}"
        text = manifest.to_json().encode()
        self._storage.write(path, text)
        # If this driver was paused after its check, a successor may have deleted the files, which
        # had no manifest. Now that there is a manifest, check them again.
        lacking = differences(manifest, self._sizes(manifest.directory))
        if lacking:
            self.delete(manifest.directory)
            raise CheckpointError(
                f"The files of {manifest.directory} were deleted while its manifest was written "
                f"({'; '.join(lacking[:3])}). Look whether another process works on this run, or "
                "cleans up its directory"
            )
        stamps = self.stamps(manifest)
        if not self.location.is_local and stamps[MANIFEST_NAME] != (len(text),):
            # Older checkpoints are deleted after this commit, so the manifest must exist.
            stored = max(0, *stamps[MANIFEST_NAME])
            raise CheckpointError(
                f"The storage reported no error, but has {stored} bytes instead of {len(text)} of "
                f"{path}"
            )
        return stamps

    def find(self, *, since_token: int) -> FoundCheckpoints:
        """Read all manifests, and compare them with the stored files.

        Args:
            since_token: checkpoints with a lower fencing token belong to a run that was started
                over, and are ignored.

        Raises:
            CheckpointError: another version of polytrain wrote a manifest.
        """
        files: dict[str, dict[str, int]] = {}
        for path, size in self._storage.list(CHECKPOINTS).items():
            directory, _, name = path.removeprefix(f"{CHECKPOINTS}/").partition("/")
            files.setdefault(directory, {})[name] = size
        committed = [
            name for name in files if _is_since(name, since_token) and MANIFEST_NAME in files[name]
        ]
        read = dict(zip(committed, at_once(self._read, committed), strict=True))
        damaged = {name: reason for name, reason in read.items() if isinstance(reason, str)}
        manifests = []
        for name, manifest in read.items():
            if isinstance(manifest, Manifest):
                wrong = differences(manifest, files[name])
                if wrong:
                    damaged[name] = "; ".join(wrong)
                else:
                    manifests.append(manifest)
        return FoundCheckpoints(
            manifests=tuple(sorted(manifests, key=lambda m: (m.attempt_id, m.number))),
            damaged=damaged,
        )

    def damage(self, manifest: Manifest) -> tuple[str, ...]:
        """Return descriptions of missing and changed files; empty if all are intact.

        Reads all of the checkpoint's files.
        """
        read = self._read(manifest.directory)
        if isinstance(read, str):
            return (read,)
        wrong = differences(manifest, self._sizes(manifest.directory)) or self._foreign(manifest)
        if wrong:
            return wrong
        digests = small_at_once(
            lambda file: self._digest(manifest, file), {file: file.size for file in manifest.files}
        )
        return tuple(
            f"{shown_name(file.name)} differs from what was committed"
            for file, digest in digests.items()
            if digest != file.sha256
        )

    def still_there(self, damaged: Mapping[str, str]) -> Mapping[str, str]:
        """Return those of some damaged checkpoints that the run's driver hasn't deleted meanwhile.

        Args:
            damaged: directory of each → description of the damage.
        """
        # A checkpoint's manifest is the first to be deleted.
        there = [name for name in sorted(damaged) if MANIFEST_NAME in self._sizes(name)]
        return {name: damaged[name] for name in there}

    def warn_of_damage(self, directory: str, wrong: str) -> None:
        """Warn that a checkpoint is left out.

        Args:
            wrong: what is wrong with it.
        """
        address = self.location_of(directory).address
        logger.warning("The checkpoint %s is damaged and is left out: %s.", address, wrong)

    def stamps(self, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        """Return values that change whenever a file of the checkpoint changes.

        A file system shows every change. Of objects only the size is known.
        """
        names = [MANIFEST_NAME, *(file.name for file in manifest.files)]
        if not self.location.is_local:
            sizes = self._sizes(manifest.directory)
            return {name: (sizes.get(name, -1),) for name in names}
        root = f"{CHECKPOINTS}/{manifest.directory}"
        try:
            statuses = self._retrying(lambda: self._files.statuses(root, names))
        except FileNotFoundError:
            return {}
        return {
            name: (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            for name, status in statuses.items()
        }

    def delete(self, directory: str) -> None:
        """Delete a checkpoint, its manifest first, so that a partly deleted one doesn't count."""
        self._storage.delete(f"{CHECKPOINTS}/{directory}/{MANIFEST_NAME}")
        self._storage.delete_below(f"{CHECKPOINTS}/{directory}")

    def sweep(self, *, before: AttemptId, known: Collection[str] = frozenset()) -> None:
        """Delete the uncommitted files of earlier attempts, which have ended.

        Args:
            known: directories of committed checkpoints, which are left alone; there may be many.

        Raises:
            OSError: one of them can't be deleted; the others are.
        """
        errors = []
        if self.location.is_local:
            # List only names: a directory may have no complete file, or thousands.
            names = {name for name, _ in self._files.names(CHECKPOINTS)}.difference(known)
            committed = set(filter(self._is_committed, names))
        else:
            paths = [path.split("/") for path in self._storage.list(CHECKPOINTS)]
            names = {path[1] for path in paths}
            committed = {path[1] for path in paths if path[2:] == [MANIFEST_NAME]}
        for name in names - committed:
            parsed = parse_directory_name(name)
            if parsed is not None and parsed[1] < before:
                try:
                    self._storage.delete_below(f"{CHECKPOINTS}/{name}")
                except OSError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _is_committed(self, name: str) -> bool:
        """Return whether a directory of a local storage has a manifest."""
        try:
            self._files.status(f"{CHECKPOINTS}/{name}/{MANIFEST_NAME}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def clear_staging(self, *, before: AttemptId) -> None:
        """Delete the files that earlier attempts, which have ended, staged in the storage."""
        if self.near_staging is not None:
            with storage_errors():
                self._retrying(partial(remove_with_root, self.near_staging, before=before))

    def _retrying(self, call: Callable[[], Answer]) -> Answer:
        """Retry a call that reads the directory directly, not through the storage."""
        location = self.location
        return retry(call, retry_s=location.retry_s, what=location.address, health=location.health)

    def _expect_files(self, manifest: Manifest) -> None:
        lacking = differences(manifest, self._sizes(manifest.directory))
        if lacking:
            place = self.location_of(manifest.directory).address
            raise OSError(
                f"files that the workers stored are missing in {place} ({'; '.join(lacking[:3])}). "
                "Set RunConfig.storage_path to a file system that all nodes mount"
            )

    def _sizes(self, directory: str) -> dict[str, int]:
        root = f"{CHECKPOINTS}/{directory}"
        return {
            path.removeprefix(f"{root}/"): size for path, size in self._storage.list(root).items()
        }

    def _read(self, directory: str) -> Manifest | str:
        try:
            manifest = parse_manifest(
                self._storage.read(f"{CHECKPOINTS}/{directory}/{MANIFEST_NAME}")
            )
        except UnknownFormatError as error:
            # A checkpoint of an unknown format isn't damaged, and must not be deleted.
            place = self.location_of(directory).address
            raise CheckpointError(
                f"{place} was written by another version of polytrain ({error}). Resume with that "
                "version, or call fit(resume='never')."
            ) from error
        except (FileNotFoundError, ValueError) as error:
            return f"its manifest can't be read: {error}"
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return f"its manifest can't be read: {error.strerror}"
        if manifest.directory != directory:
            return f"its manifest is that of another checkpoint, {manifest.directory}"
        return manifest

    def _foreign(self, manifest: Manifest) -> tuple[str, ...]:
        """Return damage by entries that are neither file nor directory: engines open paths here."""
        if self.location.is_local:
            try:
                self._files.check(f"{CHECKPOINTS}/{manifest.directory}")
            except ForeignFileError as error:
                return (str(error),)
        return ()

    def _digest(self, manifest: Manifest, file: StoredFile) -> str:
        try:
            return self._storage.digest(f"{CHECKPOINTS}/{manifest.directory}/{file.name}")
        except FileNotFoundError:
            return ""


def _is_since(directory: str, token: int) -> bool:
    parsed = parse_directory_name(directory)
    return parsed is not None and parsed[1].token >= token
