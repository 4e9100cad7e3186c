"""The location of a storage: a value that every process gets, and opens itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polytrain.config.constraints import path_or_address
from polytrain.storage.local import LocalStorage
from polytrain.storage.protocol import Storage
from polytrain.storage.retry import StorageHealth
from polytrain.text.secret_names import ADDRESS, holds_credentials, without_credentials
from polytrain_plugins.type_names import quoted

RETRY_S = 600.0
"""Seconds for which failing calls are retried by default."""


def expect_path(path: str | Path) -> None:
    """Refuse what no file can have as its path, with a better message than the system's.

    Raises:
        TypeError: it is no text.
        ValueError: it can't be a path; the message names it and the remedy.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{quoted(path)} is not a path. Give a path or an address.")
    for what, remedy in path_or_address(path):
        raise ValueError(f"The path {what}. {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A directory, or an address such as `s3://bucket/runs`."""

    address: str
    """An absolute path, or the address."""

    filesystem: Any = field(default=None, repr=False)
    """The `pyarrow.fs.FileSystem` or fsspec file system of a path; None for other locations. It may
    hold credentials, so it is never shown."""

    retry_s: float = RETRY_S
    health: StorageHealth = field(default_factory=StorageHealth, repr=False, compare=False)
    """Whether the storage answers; of all locations that were derived from one, in one process."""

    @classmethod
    def of(cls, path: str | Path, filesystem: Any = None, *, retry_s: float = RETRY_S) -> Location:
        """Return the location of a user's path, address or path on a file system.

        Raises:
            TypeError: it is no text.
            ValueError: no file can have this path; the message has the remedy.
        """
        expect_path(path)
        text = str(path)
        if getattr(filesystem, "type_name", None) == "local" and is_plain(text):
            # Arrow's local file system follows links; `LocalStorage` doesn't.
            filesystem = None
        if filesystem is None and not is_address(text):
            text = str(Path(text.removeprefix("file://")).expanduser().absolute())
        return cls(address=text.rstrip("/") or "/", filesystem=filesystem, retry_s=retry_s)

    @property
    def is_local(self) -> bool:
        """Whether it is a directory."""
        return self.filesystem is None and not is_address(self.address)

    @property
    def name(self) -> str:
        """The last part of its address."""
        return _without_options(self.address)[0].rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The location that contains it."""
        path, options = _without_options(self.address)
        return replace(self, address=(path.rpartition("/")[0] or "/") + options)

    def below(self, name: str) -> Location:
        """Return a location in it."""
        path, options = _without_options(self.address)
        return replace(self, address=f"{path.rstrip('/')}/{name}{options}")

    def open(self) -> Storage:
        """Return the storage, for use in this process.

        Raises:
            OSError: the address is unknown or can't be reached; the message says why.
        """
        if holds_credentials(self.address):
            raise PermissionError(
                f"{without_credentials(self.address)!r} has a password or another secret in it, "
                "which would end up in logs. Put it into the environment"
            )
        if self.is_local:
            return LocalStorage(Path(self.address), retry_s=self.retry_s, health=self.health)
        # Import it late: importing Arrow takes a while.
        from polytrain.storage.remote import RemoteStorage, local_directory

        filesystem, path = self._on_filesystem(is_retried=True)
        directory = local_directory(filesystem, path)
        if directory is not None:
            return LocalStorage(directory, retry_s=self.retry_s, health=self.health)
        return RemoteStorage(
            filesystem, path, root=self.address, retry_s=self.retry_s, health=self.health
        )

    def on_filesystem(self) -> tuple[Any, str]:
        """Return its `pyarrow.fs.FileSystem`, and the path on that.

        Raises:
            OSError: the address is unknown or can't be reached; the message says why.
        """
        return self._on_filesystem(is_retried=False)

    def _on_filesystem(self, *, is_retried: bool) -> tuple[Any, str]:
        from polytrain.storage.remote import arrow_filesystem

        if self.filesystem is not None:
            return arrow_filesystem(self.filesystem), self.address
        from polytrain.data_errors import SourceError
        from polytrain.storage.filesystems import find

        try:
            found = find(self.address, is_retried=is_retried)
        except SourceError as error:
            raise FileNotFoundError(str(error)) from error
        return arrow_filesystem(found.filesystem), found.path


def is_plain(path: str) -> bool:
    """Return whether it can be a path on a file system: neither an address nor below a `~`."""
    return "://" not in path and not path.startswith("~")


def is_address(location: str) -> bool:
    """Return whether it is an address, not a path of this machine."""
    return bool(ADDRESS.match(location)) and not location.startswith("file://")


def is_of_one_process(location: str, filesystem: Any) -> bool:
    """Return whether only this process can reach it, as with fsspec's `memory://`."""
    # Arrow wraps an fsspec file system in a handler; some of fsspec's own wrap others.
    given = getattr(getattr(filesystem, "handler", None), "fs", filesystem)
    protocol = getattr(getattr(given, "fs", given), "protocol", ())
    protocols = (protocol,) if isinstance(protocol, str) else protocol
    return location.startswith("memory://") or "memory" in protocols


def _without_options(location: str) -> tuple[str, str]:
    path, mark, options = location.partition("?") if is_address(location) else (location, "", "")
    return path, mark + options
