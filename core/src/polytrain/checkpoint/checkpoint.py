"""A checkpoint as a user sees it: a directory of files."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.checkpoint.starting_point import StartingPoint, fetch, starting_point, verify
from polytrain.errors import CheckpointError
from polytrain.storage.beneath import Beneath
from polytrain.storage.location import Location, expect_path
from polytrain.text.described import ShortRepr
from polytrain.text.secret_names import without_credentials
from polytrain_plugins.type_names import a_type

_METADATA = ".metadata.json"
"""File with the values of `set_metadata`."""


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint(ShortRepr):
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
        expect_path(path)
        if not Path(path).is_dir():
            raise CheckpointError(
                f"No directory {without_credentials(str(path))!r} to make a checkpoint from. "
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
        location = self._location()
        if location.is_local:
            directory = Path(location.address)
            if not directory.is_dir():
                raise CheckpointError(f"There is no checkpoint in {self.path}.")
            # A user's directory may contain links; a run's doesn't.
            if (directory / MANIFEST_NAME).exists():
                try:
                    Beneath(directory).check()
                except OSError as error:
                    raise self._unreadable(error) from error
            yield location.address
            return
        with tempfile.TemporaryDirectory(prefix="polytrain-checkpoint-") as made:
            start, files = self._found(), Path(made, "files")
            try:
                fetch(location, start.files, files)
            except OSError as error:
                raise self._unreadable(error) from error
            yield str(files)

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copy the files into a directory, create it if needed, and return its path.

        Args:
            path: the directory; by default a new temporary one, which the caller deletes.

        Raises:
            CheckpointError: the checkpoint is missing, or differs from what was committed.
        """
        if path is not None:
            expect_path(path)
        with self.as_directory() as directory:
            if path is None:
                path = tempfile.mkdtemp(prefix="polytrain-checkpoint-")
            shutil.copytree(directory, path, dirs_exist_ok=True)
        return str(path)

    def get_metadata(self) -> dict[str, Any]:
        """Return what `set_metadata` has stored; empty if nothing.

        Raises:
            CheckpointError: the file can't be read.
        """
        try:
            # Ray's own files may hold NaN.
            found = json.loads(self._location().open().read(_METADATA))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(error) from error
        if not isinstance(found, dict):
            raise self._unreadable(ValueError(f"{_METADATA} holds {a_type(found)}"))
        return found

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store values with the files, before the checkpoint is reported.

        Args:
            metadata: anything that JSON can hold.

        Raises:
            CheckpointError: it is committed already, or isn't on this machine.
        """
        if not isinstance(metadata, Mapping):
            raise TypeError(f"The metadata of a checkpoint are a dict, not {a_type(metadata)}.")
        location = self._location()
        directory = Path(location.address)
        if not location.is_local or (directory / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"The checkpoint {without_credentials(self.path)} can't get metadata: a committed "
                "checkpoint doesn't change. Call set_metadata before report(), or report the "
                "values among the metrics."
            )
        location.open().write(_METADATA, json.dumps(dict(metadata)).encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add values to the metadata, before the checkpoint is reported.

        Args:
            metadata: as for `set_metadata`; replaces values of the same names.

        Raises:
            CheckpointError: see `set_metadata`.
        """
        self.set_metadata({**self.get_metadata(), **metadata})

    def verify(self) -> None:
        """Read all files, and compare them with what was committed.

        Raises:
            CheckpointError: files differ or are missing.
        """
        try:
            verify(self._found())
        except OSError as error:
            raise self._unreadable(error) from error

    def _location(self) -> Location:
        return Location.of(self.path, self.filesystem)

    def _found(self) -> StartingPoint:
        try:
            return starting_point(self._location())
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint {without_credentials(self.path)} can't be read: {error}"
        )


def verify_here(checkpoint: Checkpoint) -> None:
    """Verify the files that `as_directory` doesn't copy: it compares those that it does.

    Raises:
        CheckpointError: see `Checkpoint.verify`.
    """
    if checkpoint._location().is_local:
        checkpoint.verify()
