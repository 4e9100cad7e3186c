"""Where a run's checkpoints lie, and the protocol by which they come to be.

1. A trainer writes its files into a staging directory (`new_staging`).
2. `store_part`: the rank's agent moves them into the checkpoint's directory, with size and hash.
3. `commit`: once all parts are there, the manifest is written. That is the commit.

Each step may be the last thing that a process does: what has no manifest is no checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polytrain.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    differences,
    parse_manifest,
)
from polytrain.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one run. Holds nothing but the path, so it travels to every process."""

    run_path: Path

    def directory(self, number: int) -> Path:
        """Where checkpoint `number` lies or will lie."""
        return self.run_path / "checkpoints" / f"checkpoint_{number:06d}"

    def new_staging(self, number: int, rank: int) -> Path:
        """An empty directory for the part of one rank, on the same file system as the final one."""
        staging = self._staging(number, rank)
        # A trainer that died while it wrote may have left something of the same number.
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def store_part(self, number: int, rank: int) -> tuple[StoredFile, ...]:
        """Move what one rank has staged into the checkpoint's directory.

        Raises:
            CheckpointError: two ranks wrote a file of the same name, or nothing was staged.
            OSError: the storage refused.
        """
        staging, directory = self._staging(number, rank), self.directory(number)
        if not staging.is_dir():
            raise CheckpointError(f"Rank {rank} has nothing staged for checkpoint {number}.")
        stored = []
        for file in _files_below(staging):
            name = file.relative_to(staging).as_posix()
            target = directory / name
            if name == MANIFEST_NAME:
                raise CheckpointError(
                    f"A checkpoint's own list of files is called {name!r}; give yours another name."
                )
            if target.exists():
                raise CheckpointError(
                    f"Rank {rank} wrote {name!r} into its checkpoint, a name that is taken. Give "
                    "each rank's files names of their own, for example with the rank in them."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            stored.append(StoredFile(name=name, size=file.stat().st_size, sha256=_sha256(file)))
            file.rename(target)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging)
        return tuple(stored)

    def commit(self, manifest: Manifest) -> Path:
        """Write the manifest, and return the checkpoint's directory."""
        directory = self.directory(manifest.number)
        torn = directory / f".{MANIFEST_NAME}"
        with torn.open("w") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        torn.rename(directory / MANIFEST_NAME)
        return directory

    def damage(self, manifest: Manifest) -> tuple[str, ...]:
        """What is missing or has changed since the commit; empty if all is intact."""
        directory = self.directory(manifest.number)
        try:
            if parse_manifest((directory / MANIFEST_NAME).read_text()).files != manifest.files:
                return ("its manifest names other files",)
        except (OSError, ValueError) as error:
            return (f"its manifest can't be read: {error}",)
        sizes = {
            file.relative_to(directory).as_posix(): file.stat().st_size
            for file in _files_below(directory)
        }
        return differences(manifest, sizes)

    def delete(self, number: int) -> None:
        """Delete a checkpoint; its manifest first, so that no reader takes what is left for one."""
        directory = self.directory(number)
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what was never committed."""
        shutil.rmtree(self.run_path / "staging", ignore_errors=True)
        for directory in self.run_path.glob("checkpoints/checkpoint_*"):
            if not (directory / MANIFEST_NAME).exists():
                shutil.rmtree(directory, ignore_errors=True)

    def _staging(self, number: int, rank: int) -> Path:
        return self.run_path / "staging" / f"checkpoint_{number:06d}-rank_{rank}"


def _files_below(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    """Hash the file, and make sure that it has reached the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest
