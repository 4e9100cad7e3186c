"""Loads what training has left, in a process that has nothing of the run but its path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from polytrain.api.backend_checks import made_backend
from polytrain.api.result import Result
from polytrain.checkpoint.checkpoint import Checkpoint, verify_here
from polytrain.checkpoint.starting_point import manifest_at
from polytrain.errors import CheckpointError, RunNotFoundError
from polytrain.storage.location import Location
from polytrain_plugins import Backend


def load(
    path: str | Path, *, filesystem: Any = None, backend: Backend | str | None = None
) -> Result:
    """Load a run or one of its checkpoints, to predict with: `load(path).predict(data)`.

    This runs no stored code. What the backend needs beyond the checkpoint, such as torch's
    `model_fn`, is passed to `predict`.

    Args:
        path: `Result.path` of a run, whether or not it has ended, or `Checkpoint.path`. Either may
            have been moved or copied.
        filesystem: as `RunConfig(storage_filesystem=…)`.
        backend: of the run, or its name. By default the run's journal says it; a checkpoint
            that was copied without its run has none.

    Returns:
        The run's result; of a checkpoint's path, with this checkpoint and its metrics.

    Raises:
        RunNotFoundError: there is neither a run nor a checkpoint.
        CheckpointError: the checkpoint is damaged, or its backend isn't known.
        OSError: the storage can't be read.
        RegistryError: no backend of this name can be loaded.
        ValueError: no file can have this path, or `backend` is wrong.
    """
    backend = made_backend(backend)
    location = Location.of(path, filesystem, retry_s=0)
    try:
        manifest = manifest_at(location)
    except NotADirectoryError:
        manifest = None
    if manifest is None:
        return Result.from_path(path, filesystem, backend=backend)
    checkpoint = Checkpoint(location.address, filesystem)
    verify_here(checkpoint)
    try:
        run = Result.from_path(location.parent.parent.address, filesystem, backend=backend)
    except RunNotFoundError as error:
        if backend is None:
            raise CheckpointError(
                f"The checkpoint {location.address} isn't in the directory of its run, which would "
                'name the backend. Pass it: load(path, backend="xgboost"), for example.'
            ) from error
        run = Result(path=location.address, backend=backend)
    # What its validation has returned is in the run's journal.
    kept = {each.path: metrics for each, metrics in run.best_checkpoints}
    metrics = kept.get(checkpoint.path, manifest.metrics)
    return replace(run, checkpoint=checkpoint, metrics=metrics)
