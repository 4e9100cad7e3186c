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
    """What the path is a path on, if it is neither of this machine nor an address: a
    `pyarrow.fs.FileSystem` or one of fsspec's."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Checkpoint:
        """A checkpoint of the files that lie in a directory now, to be handed to `report`.

        Raises:
            CheckpointError: if there is no such directory.
        """
        if not Path(path).is_dir():
            raise CheckpointError(
                f"No directory {str(path)!r} to make a checkpoint from. "
                "Write the files into a directory first, then pass its path."
            )
        return cls(str(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files as a local directory, to read from and not to change.

        Inside a training function, and where the files lie on this machine, that is the checkpoint
        itself; otherwise a copy, which is deleted at the end.

        Raises:
            CheckpointError: it isn't there, or isn't what was committed.
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
        """Copy the files into a directory, which is made if it isn't there, and return its path.

        Raises:
            CheckpointError: it isn't there, or isn't what was committed.
        """
        with self.as_directory() as directory:
            shutil.copytree(directory, path, dirs_exist_ok=True)
        return str(path)

    def verify(self) -> None:
        """Read all of the files, and compare them with what was committed.

        Raises:
            CheckpointError: they differ, or aren't there.
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
