"""What becomes of a part that a trainer has staged: stored, or a failure of its rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import Failure, FailureKind
from polytrain.run.events import Failed, PartStored


def stored_part(
    store: CheckpointStore,
    *,
    generation: int,
    rank: int,
    checkpoint: int,
    step: int,
    metrics: Mapping[str, Any],
    positions: Mapping[str, Any],
) -> PartStored | Failed:
    """Store one rank's part of a checkpoint, and say how it went. Never raises.

    Args:
        store: where it has been staged.
        generation: which made it.
        rank: which made it.
        checkpoint: the checkpoint's number in the run.
        step: what the rank had reported last.
        metrics: reported at that step.
        positions: data set → where the rank stood in it.
    """
    try:
        files = store.store_part(checkpoint, rank)
    except Exception as error:  # whatever a storage raises ends the attempt, not the watcher
        failure = Failure(
            kind=FailureKind.STORAGE, rank=rank, message=f"{type(error).__name__}: {error}"
        )
        return Failed(generation=generation, failure=failure)
    return PartStored(
        generation=generation,
        rank=rank,
        checkpoint=checkpoint,
        step=step,
        metrics=metrics,
        positions=positions,
        files=files,
    )
