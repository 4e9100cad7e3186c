"""Finds problems of a run's storage, by what it takes from this process. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from polytrain.storage.beneath import Beneath
from polytrain.storage.location import Location, is_of_one_process, is_plain
from polytrain.storage.protocol import StorageError
from polytrain.text.secret_names import holds_credentials, without_credentials
from polytrain_plugins import Problem
from polytrain_plugins.type_names import a_type

_FIELD = "RunConfig.storage_path"


def storage_problems(location: Location, *, num_workers: int) -> Iterator[Problem]:
    """Yield the problems that keep a run from being stored at a location.

    Args:
        num_workers: worker processes that have to reach it; 0 if there are none.
    """
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
        # Permissions don't show read-only and special file systems; a write does.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Problem(
            field=field,
            what=f"{str(existing)!r} can't be written to ({error.strerror})",
            remedy="Give a directory in which this user may create files",
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
    probe = f".polytrain-probe-{secrets.token_hex(8)}"
    try:
        storage = replace(location.parent, retry_s=0).open()
        storage.write(probe, b"")
        storage.delete(probe)
    except OSError as error:
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
