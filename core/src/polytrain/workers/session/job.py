"""The input of a worker process: the job of the run, and the order of one attempt."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.run_spec import RunSpec
from polytrain.functions.pickling import code_of_job, pickled_with
from polytrain.storage.location import Location
from polytrain_plugins import CheckpointKind, Member

if TYPE_CHECKING:
    from polytrain.checkpoint.store import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The job, the same for every rank and attempt of a run."""

    spec: RunSpec
    """The request, with the fields that worker processes read."""

    checkpoints: Location
    """Location of committed checkpoints, in the run's directory."""

    near_staging: Path | None
    """Staging directory on the storage's own file system."""

    validates: bool = False
    """Whether the run has a function that validates checkpoints."""

    skips_bad_batches: bool = False
    """Whether batches are left out after training has diverged."""

    @classmethod
    def of(cls, spec: RunSpec, store: CheckpointStore) -> WorkerJob:
        """Return the job of a run.

        Args:
            store: the run's checkpoints.
        """
        return cls(
            spec=spec.for_workers(),
            checkpoints=store.checkpoints,
            near_staging=store.near_staging,
            validates=spec.validation_config is not None,
            skips_bad_batches=spec.run_config.failure_config.skips_bad_batches,
        )

    def pickled(self) -> bytes:
        """Return the pickled job, including the user's code that worker processes can't import."""
        spec = self.spec
        config = spec.run_config
        functions = config.stop, config.failure_config.divergence
        code = code_of_job(spec.train_loop_per_worker, spec.backend, *functions)
        return pickled_with(*code, value=self)

    @property
    def waits_for_commit(self) -> bool:
        """Whether a report with a checkpoint waits for the commit."""
        return self.spec.run_config.checkpoint_config.upload == "sync"

    def changed(self, order: LaunchOrder) -> WorkerJob:
        """Return the job of an attempt, with what `on_rollback` has returned."""
        if order.changes is None:
            return self
        return replace(self, spec=replace(self.spec, **pickle.loads(order.changes)))

    def writes_checkpoints(self, rank: int) -> bool:
        """Return whether the files that this rank reports are part of a checkpoint."""
        return (
            rank == 0
            or self.spec.merges_files
            or self.spec.checkpoint_kind is CheckpointKind.EVERY_RANK
        )


class JobMemory:
    """The pickled job in memory that all worker processes of a node map.

    A training function may hold much data, for example a closure over an array. Sent through each
    worker process's socket it would be copied several times per rank, and again at each restart.
    """

    def __init__(self, pickled: bytes) -> None:
        self.descriptor = os.memfd_create("polytrain-job")
        with os.fdopen(self.descriptor, "wb", closefd=False) as file:
            file.write(pickled)

    def close(self) -> None:
        """Free the memory, except where worker processes still map it."""
        os.close(self.descriptor)


def unpickled_job(descriptor: int) -> WorkerJob:
    """Return the job in the memory of a descriptor, and close that.

    Raises:
        Exception: any error of unpickling the user's objects.
    """
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
            job: WorkerJob = pickle.loads(memory)
            return job
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """The order to launch one attempt, the same for all its ranks."""

    attempt_id: AttemptId
    members: tuple[Member, ...]
    start: StartingPoint
    first_checkpoint: int
    """Number of this attempt's first checkpoint."""

    last_reports: Sequence[Mapping[str, Any]] = ()
    """Rank 0's last reports before the starting point, if divergence is found by them."""

    is_repeat: bool = False
    """Whether an earlier attempt of this driver has reported: its notices aren't said again."""

    changes: bytes | None = None
    """Arguments of the request that `on_rollback` has changed, pickled; None if there are none."""

    @property
    def attempt(self) -> int:
        """Number of the attempt among this driver's."""
        return self.attempt_id.attempt
