"""A checkpoint as a user sees it: a directory of files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polytrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory of files that training can go on from."""

    path: str
    """The directory."""

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
        """The files as a local directory, to read from and not to change."""
        yield self.path

    def to_directory(self, path: str | Path) -> str:
        """Copy the files into a directory, which is made if it isn't there, and return its path."""
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        return str(path)
