"""Stores a part that a worker process has staged: the outcome is stored, void or a failure."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytrain.checkpoint.events import PartStored, PartVoid
from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.snapshot import Stamps
from polytrain.checkpoint.staging import remove, staged_in
from polytrain.checkpoint.store import CheckpointStore, SnapshotChangedError
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Failed
from polytrain.storage.location import Location
from polytrain.storage.protocol import StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPart:
    """One rank's complete part of a checkpoint, in its staging directory."""

    attempt_id: AttemptId
    rank: int
    checkpoint: int
    """The checkpoint's number in the run."""

    staged: Path | None
    """The staging directory; None if the rank has written its files to the storage itself."""

    stamps: Stamps
    step: int
    """The rank's last reported step."""

    metrics: Mapping[str, Any]
    """The metrics of that step."""

    positions: Mapping[str, Any]
    """Data set → the rank's position in it."""

    validation: Mapping[str, Any] | None = None
    """The requested validation, as plain values; None if none is requested."""


def misplaced_part(part: StagedPart, *, scratch: Path, near: Path | None) -> Failed | None:
    """Check the staging directory that a worker process names; return a failure if it is wrong.

    The check is needed because the agent moves the files away and deletes the directory.

    Args:
        part: the part as the worker process describes it.
        scratch: the run's directory on the node.
        near: the staging directory in the storage, if there is one.
    """
    name = directory_name(part.checkpoint, part.attempt_id)
    roots = [root for root in (scratch, near) if root is not None]
    if part.staged is None or part.staged in [staged_in(root, name, part.rank) for root in roots]:
        return None
    message = f"it staged its part of {name} in {part.staged}, which is outside the run"
    failure = Failure(kind=FailureKind.STORAGE, rank=part.rank, message=message)
    return Failed(attempt=part.attempt_id.attempt, failure=failure)


def stored_part(
    store: CheckpointStore, part: StagedPart, stored_already: Mapping[str, str] | None = None
) -> PartStored | PartVoid | Failed:
    """Store one rank's part of a checkpoint, and return the outcome. Never raises.

    Args:
        store: the run's checkpoints.
        part: the part to store.
        stored_already: name → SHA-256 of the files that rank 0 has stored already.
    """
    attempt = part.attempt_id.attempt
    try:
        directory = directory_name(part.checkpoint, part.attempt_id)
        known = stored_already or {}
        if part.staged is None:
            stored = store.find_part(directory, part.rank, stored_already=known)
        else:
            stored = store.store_part(
                directory, part.rank, part.staged, part.stamps, stored_already=known
            )
    except SnapshotChangedError as error:
        return PartVoid(
            attempt=attempt, rank=part.rank, checkpoint=part.checkpoint, reason=str(error)
        )
    except Exception as error:  # any error of a storage ends the attempt, not the agent
        failure = Failure(
            kind=FailureKind.STORAGE, rank=part.rank, message=storage_message(error, store.location)
        )
        return Failed(attempt=attempt, failure=failure)
    return PartStored(
        attempt=attempt,
        rank=part.rank,
        checkpoint=part.checkpoint,
        step=part.step,
        metrics=part.metrics,
        positions=part.positions,
        files=stored.files,
        left_out=stored.left_out,
        validation=part.validation,
    )


def clear_staged(part: StagedPart) -> None:
    """Delete a staged part."""
    if part.staged is not None:
        remove(part.staged)


def storage_message(error: Exception, location: Location) -> str:
    """Return the user's message for an error of the run's storage."""
    error = error.cause if isinstance(error, StorageError) else error
    text = f"{type(error).__name__}: {error}"
    if is_full(error):
        return f"{text}. {location.address} is full; the checkpoints that are there are intact"
    return text


def is_full(error: BaseException) -> bool:
    """Return whether the storage is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
