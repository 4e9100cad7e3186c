"""Tries whether this process can use a storage: it writes, reads back and deletes a file."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from polytrain.storage.location import Location
from polytrain.storage.protocol import StorageError

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
