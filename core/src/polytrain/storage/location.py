"""The location of a storage: a value that every process gets, checks, and opens itself."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from polytrain.config.constraints import storage_place, working_directory
from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import StorageHealth, is_full
from polytrain.storage.local import LocalStorage
from polytrain.storage.protocol import Storage, StorageError
from polytrain.text.secret_names import ADDRESS, holds_credentials, without_credentials
from polytrain_plugins import Problem
from polytrain_plugins.type_names import a_type, quoted

OPTIONS = re.compile(r"\?\w+=[^/&?*]*(?:&\w+=[^/&?*]*)*\Z")
"""Options at the end of an address: ?region=…&scheme=http. A lone ? is part of a name or a glob."""

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
    for what, remedy in storage_place(path):
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
            text = _absolute(Path(local_path(text)).expanduser())
        # An address without a bucket stays one.
        scheme, mark, path = text.rpartition("://")
        address = f"{scheme}{mark}{path.rstrip('/')}" or "/"
        return cls(address=address, filesystem=filesystem, retry_s=retry_s)

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
        above = path if path.endswith("://") else path.rstrip("/")
        return replace(self, address=f"{above}/{name}{options}")

    def open(self) -> Storage:
        """Return the storage, for use in this process.

        Raises:
            OSError: the address is unknown or can't be reached; the message says why.
        """
        if self.is_local:
            return LocalStorage(Path(self.address), retry_s=self.retry_s, health=self.health)
        if holds_credentials(self.address):
            raise PermissionError(
                f"{without_credentials(self.address)!r} has a password or another secret in it, "
                "which would end up in logs. Put it into the environment"
            )
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


def _absolute(path: Path) -> str:
    for what, remedy in () if path.is_absolute() else working_directory():
        remedy += ", or give an absolute path"
        raise ValueError(f"The path {str(path)!r} is relative, and {what}. {remedy}")
    return str(path.absolute())


def local_path(place: str) -> str:
    """Return a path as it is, and that of a `file://` address, percent-encoded or not."""
    path = place.removeprefix("file://")
    return path if path == place or os.path.exists(path) else unquote(path)


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
    found = OPTIONS.search(location) if is_address(location) else None
    options = found.group() if found else ""
    return location.removesuffix(options), options


_FIELD = "RunConfig.storage_path"


def storage_problems(
    location: Location, *, name: str | None = None, num_workers: int
) -> Iterator[Problem]:
    """Yield the problems that keep a run from being stored at a location.

    Args:
        name: the run's name, if the user has given it one.
        num_workers: worker processes that have to reach it; 0 if there are none.
    """
    if name is not None and location.name != name:
        yield Problem(
            field="RunConfig.name",
            what=f"{location.address!r} would end with options, and not with {name!r}",
            remedy=f"Give a name without a question mark, such as {name.replace('?', '_')!r}",
        )
        return
    path = Path(location.address)
    is_used = location.is_local and not Beneath(path).is_empty()
    if is_used and not (path / "leases").is_dir():
        yield Problem(
            field="RunConfig.name",
            what=f"{str(path)!r} exists already, and isn't a run",
            remedy="Choose another name, or leave it out to get a new one",
        )
        return
    yield from writing_problems(location, field=_FIELD, num_workers=num_workers)


def writing_problems(location: Location, *, field: str, num_workers: int) -> Iterator[Problem]:
    """Yield the problems that keep files from being written below a location.

    Args:
        location: a directory or an address, which may not exist yet.
        num_workers: worker processes that have to reach it; 0 if there are none.
    """
    if holds_credentials(location.address):
        yield Problem(
            field=field,
            what=f"{without_credentials(location.address)!r} has a password or another secret in "
            "it, which would end up in logs",
            remedy="Put it into the environment, for example into AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
            + (", or pass RunConfig(storage_filesystem=…)" if field == _FIELD else ""),
        )
    elif is_of_one_process(location.address, location.filesystem) and num_workers > 0:
        yield Problem(
            field=field,
            what=f"{location.address!r} is memory of this process, which workers can't reach",
            remedy="Use it with num_workers=0, or give a directory or an address",
        )
    elif location.is_local:
        yield from _directory_problems(Path(location.address), field)
    else:
        yield from _address_problems(location, field)


def _directory_problems(path: Path, field: str) -> Iterator[Problem]:
    existing = next(p for p in (path, *path.parents) if p.exists())
    try:
        # Permissions don't show read-only, full and special file systems; a write does.
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            # A full file system takes empty files.
            file.write(bytes(4096))
    except OSError as error:
        if is_full(error) and (path / "leases").is_dir():
            # The result of a finished run needs no room, and a run that is resumed waits for it.
            return
        yield Problem(
            field=field,
            what=f"{str(existing)!r} can't be written to ({error.strerror})",
            remedy="Make room there, or give another directory"
            if is_full(error)
            else "Give a directory in which this user may create files",
        )


def _address_problems(location: Location, field: str) -> Iterator[Problem]:
    if location.filesystem is not None:
        from polytrain.storage.remote import arrow_filesystem

        if arrow_filesystem(location.filesystem) is None or not is_plain(location.address):
            yield Problem(
                field="RunConfig.storage_filesystem",
                what=f"{location.address!r} isn't a path on {a_type(location.filesystem)}",
                remedy="Give a pyarrow.fs.FileSystem or one of fsspec's, with a path on it as "
                "storage_path; or an address without storage_filesystem",
            )
            return
    from polytrain.data_errors import SourceError

    probe = f".polytrain-probe-{secrets.token_hex(8)}"
    try:
        storage = replace(location.parent, retry_s=0).open()
        storage.write(probe, b"")
        storage.delete(probe)
    except OSError as error:
        if isinstance(error.__cause__, SourceError):
            # The address itself: it says what is wrong, and what to do.
            yield Problem(field=field, what=error.__cause__.what, remedy=error.__cause__.remedy)
            return
        yield Problem(
            field=field,
            what=f"{location.parent.address!r} can't be written to: {error}",
            remedy="Check the address, and the servers and credentials in the environment",
        )


_OF_A_DIRECTORY = (
    "Mount it there so that this user can write, or set RunConfig.storage_path to a directory to "
    "which every node can write, or to object storage such as s3://bucket"
)
_OF_AN_ADDRESS = (
    "Nodes don't have the driver's environment. Put servers and credentials into the environment "
    "with which Ray is started on every node, or give them to all processes of the job: "
    'ray.init(runtime_env={"env_vars": {"AWS_ACCESS_KEY_ID": …}})'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a storage refuses to this process."""

    what: str
    """The operation, the storage and the reason: the end of a sentence about the process."""

    remedy: str


class _RefusedError(Exception):
    """An operation failed."""


def refusal(location: Location) -> Refusal | None:
    """Write, read back and delete a file of this process's own; return what is refused, if any.

    Leaves nothing behind, and follows no link.

    Args:
        location: the storage. Temporary errors are retried for its `retry_s`.
    """
    try:
        _try(location)
    except _RefusedError as refused:
        remedy = _OF_A_DIRECTORY if location.is_local else _OF_AN_ADDRESS
        return Refusal(what=str(refused), remedy=remedy)
    return None


def _try(location: Location) -> None:
    name, content = f".polytrain-trial-{secrets.token_hex(8)}", secrets.token_bytes(16)
    with _named("reach", location):
        storage = location.open()
    try:
        with _named("write to", location):
            storage.write(name, content)
        with _named("read what it has written to", location):
            if storage.read(name) != content:
                raise OSError("it has other content")
        with _named("delete files in", location):
            storage.delete(name)
    except _RefusedError:
        # A write that failed may have left a file.
        with contextlib.suppress(Exception):
            storage.delete(name)
        raise


@contextmanager
def _named(operation: str, location: Location) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # file systems raise whatever their clients do
        cause = error.cause if isinstance(error, StorageError) else error
        reason = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
        raise _RefusedError(f"can't {operation} {location.address} ({reason})") from error
