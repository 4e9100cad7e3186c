"""A checkpoint as a user sees it: a directory of files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.checkpoint.starting_point import StartingPoint, fetch, starting_point, verify
from polytrain.common.errors import CheckpointError
from polytrain.storage.location import Location, without_credentials


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory of files that training can resume from."""

    path: str
    """The directory, or its address."""

    filesystem: Any = field(default=None, repr=False)
    """The file system of the path, if it is not a local path or an address: a
    `pyarrow.fs.FileSystem` or an fsspec file system."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Checkpoint:
        """Make a checkpoint of the files in a directory, to pass to `report`.

        Raises:
            CheckpointError: there is no such directory.
        """
        if not Path(path).is_dir():
            raise CheckpointError(
                f"No directory {str(path)!r} to make a checkpoint from. "
                "Write the files into a directory first, then pass its path."
            )
        return cls(str(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the files as a local directory. Read from it; don't change it.

        Inside a training function, and if the files are on this machine, this is the checkpoint
        itself. Otherwise it is a copy, which is deleted at the end.

        Raises:
            CheckpointError: the checkpoint is missing, or differs from what was committed.
        """
        location = Location.of(self.path, self.filesystem)
        if location.is_local:
            if not Path(location.address).is_dir():
                raise CheckpointError(f"There is no checkpoint in {self.path}.")
            yield location.address
            return
        with tempfile.TemporaryDirectory(prefix="polytrain-checkpoint-") as directory:
            start, files = self._found(), Path(directory, "files")
            try:
                fetch(location, start.files, files)
            except OSError as error:
                raise self._unreadable(error) from error
            yield str(files)

    def to_directory(self, path: str | Path) -> str:
        """Copy the files into a directory, create it if needed, and return its path.

        Raises:
            CheckpointError: the checkpoint is missing, or differs from what was committed.
        """
        with self.as_directory() as directory:
            shutil.copytree(directory, path, dirs_exist_ok=True)
        return str(path)

    def verify(self) -> None:
        """Read all files, and compare them with what was committed.

        Raises:
            CheckpointError: files differ or are missing.
        """
        try:
            verify(self._found())
        except OSError as error:
            raise self._unreadable(error) from error

    def _found(self) -> StartingPoint:
        try:
            return starting_point(Location.of(self.path, self.filesystem))
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint {without_credentials(self.path)} can't be read: {error}"
        )
