"""Checks of a storage: what checkpoints and leases rely on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain.view.doctor.finding import CheckFailed, Verdict

_SLOW_S = 1.0
_SKEW_S = 5.0


def checks_of(location: Location) -> Mapping[str, Callable[[], str]]:
    """Return the checks of a storage, by name. They leave nothing behind."""
    return {
        "storage: exclusive create": partial(_within, location, exclusive_create),
        "storage: write, read, delete": partial(_within, location, write_read_delete),
        "storage: clock": partial(clock, location),
    }


def exclusive_create(storage: Storage) -> str:
    """A lease is a file that one of several drivers creates."""
    first = storage.create("lease", b"1")
    second = storage.create("lease", b"2")
    if first is None or second is not None or storage.read(first) != b"1":
        raise CheckFailed(
            "a file can be created twice, so two drivers could work on one run",
            "Use a storage with conditional writes, or a local or NFS file system",
        )
    return "the second of two was refused"


def write_read_delete(storage: Storage) -> str:
    """Checkpoints are written, read, listed and deleted."""
    data = secrets.token_bytes(2**20)
    began = time.monotonic()
    storage.write("a/b", data)
    wrote_s = time.monotonic() - began
    if storage.read("a/b") != data or storage.list("a") != {"a/b": len(data)}:
        raise CheckFailed("what was written isn't read back", "Use another storage")
    storage.write("a/b", b"")
    if storage.read("a/b") != b"":
        raise CheckFailed("a replaced file has its old content", "Use a storage without a cache")
    storage.delete("a/b")
    if storage.list("a"):
        raise CheckFailed("a deleted file is still listed", "Use a storage without a cache")
    if wrote_s > _SLOW_S:
        raise CheckFailed(
            f"1 MB takes {wrote_s:.1f} s until it survives the machine",
            "Checkpoints are stored in the background; use a faster storage if commits lag behind",
            verdict=Verdict.WARNING,
        )
    return f"1 MB survives the machine after {wrote_s * 1000:.0f} ms"


def clock(location: Location) -> str:
    """A mounted file system's clock, against this machine's."""
    if not location.is_local:
        return "not checked in object storage"
    root = Path(location.address)
    root.mkdir(parents=True, exist_ok=True)
    file = root / f".polytrain-doctor-{secrets.token_hex(8)}"
    file.touch()
    try:
        skew_s = file.stat().st_mtime - time.time()
    finally:
        file.unlink()
    if abs(skew_s) > _SKEW_S:
        raise CheckFailed(
            f"its clock differs by {skew_s:.0f} s from this machine's",
            "Synchronise both (NTP). Runs don't rely on it, but times in reports are wrong",
            verdict=Verdict.WARNING,
        )
    return "agrees with this machine's"


def _within(location: Location, check: Callable[[Storage], str]) -> str:
    name = f".polytrain-doctor-{secrets.token_hex(8)}"
    storage = location.below(name).open()
    try:
        return check(storage)
    finally:
        location.open().delete_below(name)
