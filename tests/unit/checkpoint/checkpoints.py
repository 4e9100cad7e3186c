"""What tests of checkpoints make them of: staged files, stored parts, manifests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import AttemptId, Manifest, StoredFile, directory_name
from polytrain.checkpoint.staging import Stagings
from polytrain.checkpoint.store import CheckpointStore
from polytrain.storage.location import Location

ATTEMPT = AttemptId(token=1, attempt=0)


def store_in(place: Path | Location) -> CheckpointStore:
    """The checkpoints of a run in this place; a directory's storage gives up at the first error."""
    if isinstance(place, Location):
        return CheckpointStore(location=place)
    return CheckpointStore(location=Location.of(place, retry_s=0))


def stage(
    store: CheckpointStore,
    number: int,
    rank: int = 0,
    *,
    attempt_id: AttemptId = ATTEMPT,
    **files: str,
) -> Path:
    """Stage one rank's part of a checkpoint beside a store: names and their text."""
    assert store.near_staging is not None
    return _staged(store.near_staging, directory_name(number, attempt_id), rank, files)


def store_part(
    store: CheckpointStore,
    number: int,
    rank: int = 0,
    *,
    attempt_id: AttemptId = ATTEMPT,
    **files: str,
) -> tuple[StoredFile, ...]:
    """Store one rank's part in the checkpoint's directory."""
    name = directory_name(number, attempt_id)
    with tempfile.TemporaryDirectory(prefix="polytrain-test-") as scratch:
        staged = _staged(Path(scratch), name, rank, files)
        return store.store_part(name, rank, staged, {}).files


def _staged(scratch: Path, name: str, rank: int, files: Mapping[str, str]) -> Path:
    staging = Stagings(scratch=scratch, near=None).new(name, rank)
    for file, text in files.items():
        (staging / file).write_text(text)
    return staging


def manifest(number: int, files: Iterable[StoredFile] = (), **changes: Any) -> Manifest:
    """A manifest of these files."""
    fields: Mapping[str, Any] = {
        "attempt_id": ATTEMPT,
        "step": 1,
        "metrics": {},
        "backend": "reference",
        "written_by": "rank_0",
        "versions": {"python": "3.11"},
        "created": "2024-02-29T12:00:00+00:00",
        "world_size": 1,
        "positions": {},
    }
    return Manifest(number=number, files=tuple(files), **{**fields, **changes})


def commit(store: CheckpointStore, number: int, **files: str) -> Manifest:
    """Commit a checkpoint of one rank with these files: names and their text."""
    made = manifest(number, store_part(store, number, 0, attempt_id=ATTEMPT, **files))
    store.commit(made)
    return made


def directory_of(store: CheckpointStore, made: Manifest) -> Path:
    """Where a checkpoint's files lie."""
    return Path(store.location_of(made.directory).address)


def directories(store: CheckpointStore) -> list[str]:
    """Names of all directories beside the checkpoints' own, in order."""
    checkpoints = Path(store.location.address, "checkpoints")
    return sorted(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else []
