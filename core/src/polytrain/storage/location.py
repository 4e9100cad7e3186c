"""Where a storage is: a value that travels to every process, each of which opens it for itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polytrain.storage.local import LocalStorage
from polytrain.storage.protocol import Storage

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)

PATIENCE_S = 600.0
"""How long a storage may be out by default, before what needs it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A directory, or an address such as `s3://bucket/runs`."""

    address: str
    """An absolute path, or the address."""

    filesystem: Any = field(default=None, repr=False)
    """A `pyarrow.fs.FileSystem` or one of fsspec's that the location is a path on. It may hold
    credentials: it is never shown."""

    patience_s: float = PATIENCE_S
    """How long calls are repeated that fail."""

    @classmethod
    def of(
        cls, path: str | Path, filesystem: Any = None, *, patience_s: float = PATIENCE_S
    ) -> Location:
        """The location that a user means by a path, an address or a path on a file system."""
        text = str(path)
        if filesystem is None and not is_address(text):
            text = str(Path(text.removeprefix("file://")).expanduser().absolute())
        return cls(address=text.rstrip("/") or "/", filesystem=filesystem, patience_s=patience_s)

    @property
    def is_local(self) -> bool:
        """Whether it is a directory."""
        return self.filesystem is None and not is_address(self.address)

    @property
    def name(self) -> str:
        """Its last part."""
        return _without_options(self.address)[0].rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """What it lies in."""
        path, options = _without_options(self.address)
        return replace(self, address=(path.rpartition("/")[0] or "/") + options)

    def below(self, name: str) -> Location:
        """A location in it."""
        path, options = _without_options(self.address)
        return replace(self, address=f"{path.rstrip('/')}/{name}{options}")

    def open(self) -> Storage:
        """The storage, to be used in this process.

        Raises:
            OSError: there is nothing at such an address; the message says what is known.
        """
        if self.is_local:
            return LocalStorage(Path(self.address), patience_s=self.patience_s)
        # Arrow takes a while to import.
        from polytrain.storage.remote import RemoteStorage, arrow_filesystem

        if self.filesystem is not None:
            return RemoteStorage(
                arrow_filesystem(self.filesystem),
                self.address,
                root=self.address,
                patience_s=self.patience_s,
            )
        from polytrain.data.sources.errors import SourceError
        from polytrain.data.sources.filesystems import find

        try:
            found = find(self.address)
        except SourceError as error:
            raise FileNotFoundError(str(error)) from error
        return RemoteStorage(
            found.filesystem, found.path, root=self.address, patience_s=self.patience_s
        )


def is_address(location: str) -> bool:
    """Whether it names more than a path of this machine."""
    return bool(_ADDRESS.match(location)) and not location.startswith("file://")


def holds_credentials(location: str) -> bool:
    """Whether an address has a password in it, which would end up in logs."""
    found = _ADDRESS.match(location)
    if found is None:
        return False
    user, at, _ = found["rest"].partition("/")[0].rpartition("@")
    return bool(at) and ":" in user


def is_of_one_process(location: str, filesystem: Any) -> bool:
    """Whether only this process can reach it, as with fsspec's `memory://`."""
    protocol = getattr(filesystem, "protocol", ())
    protocols = (protocol,) if isinstance(protocol, str) else protocol
    return location.startswith("memory://") or "memory" in protocols


def _without_options(location: str) -> tuple[str, str]:
    path, mark, options = location.partition("?") if is_address(location) else (location, "", "")
    return path, mark + options
