"""Finds problems of a run's storage before any worker starts. Leaves nothing behind."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from polytrain.storage.beneath import Beneath
from polytrain.storage.location import Location, is_of_one_process, is_plain
from polytrain.text.addresses import holds_credentials, without_credentials
from polytrain_plugins import Problem
from polytrain_plugins.type_names import a_type

_FIELD = "RunConfig.storage_path"


def storage_problems(location: Location, *, num_workers: int) -> Iterator[Problem]:
    """Yield the problems that keep a run from being stored at a location.

    Args:
        location: the run's location.
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
        field: the argument that names it.
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
