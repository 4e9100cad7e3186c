"""What becomes of a part that a worker has staged: stored, void, or a failure of its rank."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytrain.checkpoint.events import PartStored, PartVoid
from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.snapshot import Stamps
from polytrain.checkpoint.store import CheckpointStore, SnapshotChangedError
from polytrain.common.errors import Failure, FailureKind
from polytrain.common.events import Failed
from polytrain.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPart:
    """One rank's part of a checkpoint, complete, in its staging directory."""

    attempt_id: AttemptId
    rank: int
    checkpoint: int
    """The checkpoint's number in the run."""

    staged: Path
    stamps: Stamps
    step: int
    """What the rank had reported last."""

    metrics: Mapping[str, Any]
    """Reported at that step."""

    positions: Mapping[str, Any]
    """Data set → where the rank stood in it."""


def stored_part(store: CheckpointStore, part: StagedPart) -> PartStored | PartVoid | Failed:
    """Store one rank's part of a checkpoint, and say how it went. Never raises."""
    attempt = part.attempt_id.attempt
    try:
        directory = directory_name(part.checkpoint, part.attempt_id)
        files = store.store_part(directory, part.rank, part.staged, part.stamps)
    except SnapshotChangedError as error:
        return PartVoid(
            attempt=attempt, rank=part.rank, checkpoint=part.checkpoint, reason=str(error)
        )
    except Exception as error:  # whatever a storage raises ends the attempt, not the watcher
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
        files=files,
    )


def storage_message(error: Exception, location: Location) -> str:
    """What the storage of a run has raised, in words for the user."""
    text = f"{type(error).__name__}: {error}"
    if is_full(error):
        return f"{text}. {location.address} is full; the checkpoints that are there are intact"
    return text


def is_full(error: BaseException) -> bool:
    """Whether there is no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
