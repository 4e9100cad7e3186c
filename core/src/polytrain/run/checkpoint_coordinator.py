"""Coordinates a run's checkpoints in the driver, from staged parts to the commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, assert_never

from polytrain.checkpoint.manager import CheckpointManager, is_good
from polytrain.checkpoint.manifest import AttemptId, Manifest
from polytrain.checkpoint.parts import (
    CheckpointEvent,
    Committed,
    PartStaged,
    PartStored,
    PartTracker,
    PartVoid,
    StateWritten,
    storage_message,
)
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import CheckpointError, Failure, FailureKind, RunOwnedError
from polytrain.events.attempt import Failed
from polytrain.output.observers import Observers
from polytrain.policy.retention import missing_score
from polytrain.policy.validation import Validation, ValidationStatus
from polytrain.record.entries import CheckpointCommitted, CheckpointDropped
from polytrain.record.journal import Journal
from polytrain.run.attached_work import AttachedWork
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.lease import Lease
from polytrain.storage.protocol import storage_errors
from polytrain.workers.agents.calls import Acknowledge, StoreRest
from polytrain.workers.driver.group import WorkerGroup
from polytrain_plugins import RunInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckpointCoordinator:
    """Counts the parts of each checkpoint, commits it, and notifies the ranks that wait for it.

    Only the thread of the background tasks touches the storage.
    """

    run: RunInfo
    group: WorkerGroup
    manager: CheckpointManager
    lease: Lease
    journal: Journal
    background_tasks: BackgroundTasks
    observers: Observers
    deadlines: Deadlines
    attached: AttachedWork | None = None
    _attempt: int = -1
    _rank_0_is_gone: bool = False
    _tracker: PartTracker | None = None
    _has_warned_of_score: bool = False
    _has_warned_of_lost_steps: bool = False
    _has_warned_of_files: bool = False
    _has_warned_of_no_files: bool = False
    _highest_staged: int = -1
    _waiting: dict[int, set[int]] = field(default_factory=dict)
    """Number → ranks whose staged part waits for rank 0's."""

    _undeleted: list[str] = field(default_factory=list)
    """Directories that couldn't be deleted; for the thread of the background tasks alone."""

    def next_start(self, attempt: int) -> StartingPoint:
        """Return the next attempt's starting point, and drop the last one's staged parts.

        Raises:
            StorageError: the storage can't be read.
            RunOwnedError: another driver holds the lease, or the run's directory is gone: its
                checkpoints would seem damaged.
        """
        if attempt:
            with storage_errors():
                self.lease.check()
        self.manager.store.clear_staging(before=self._id_of(attempt))
        start = self.manager.start()
        self._warn_of_lost_steps(attempt, start)
        return start

    def launched(self, attempt: int, world_size: int) -> None:
        """Note that an attempt starts."""
        writers = self.manager.launched(world_size)
        self._attempt = attempt
        self._rank_0_is_gone = False
        self._waiting.clear()
        self._tracker = PartTracker(set(writers), self.manager.config.report_timeout_s)
        self.deadlines.set(Deadline.PARTS, None)
        self.background_tasks.submit(partial(self._sweep, self._id_of(attempt)))
        # An earlier driver may have died before it deleted these.
        self._retire()

    def take(self, event: CheckpointEvent, *, good_step: int | None) -> Failed | None:
        """Handle an event; return the failure if it ends the attempt.

        Args:
            good_step: `State.good_step`.
        """
        match event:
            case PartStaged():
                return self._staged(event)
            case PartStored():
                return self._stored(event)
            case PartVoid():
                return self._void(event)
            case Committed():
                self._committed(event, good_step)
            case _:
                assert_never(event)
        return None

    def validated(self, validation: Validation) -> None:
        """Note that a validation has ended: the checkpoint may now rank differently."""
        info = self.manager.info_of(validation.checkpoint)
        if info is not None:
            self._check_score(validation.checkpoint, info.metrics)
            if validation.status is ValidationStatus.VALIDATED:
                self.observers.checkpoint_validated(self.run, info)
        # No driver may find a checkpoint deleted for metrics that are lost.
        self.background_tasks.submit(self.journal.sync)
        self._retire()

    def refusal(self, written: StateWritten, *, reported: int) -> str:
        """Return why a survivor's state isn't to be committed; empty if it is."""
        step, newest = written.part.step, self.manager.checkpoints[-1:]
        if step < reported and not (written.is_copy or written.is_earlier):
            # Its rank may not report at all: then the number says nothing.
            return f"rank 0 had reported step {reported}, and this state is that of step {step}"
        for manifest in newest:
            # A booster's rounds are its steps: nothing is read in between.
            is_same = written.is_report or written.part.positions == manifest.positions
            is_known = (
                manifest.step == step and is_same and not (written.is_ahead or manifest.is_rescue)
            )
            if manifest.step > step or is_known:
                return f"the checkpoint of step {manifest.step} is as new"
        return ""

    def commit_state(self, written: StateWritten) -> str:
        """Commit a survivor's state; return the name of its directory."""
        part = written.part
        if not written.is_report:
            # Its metrics would rank it beside the checkpoint that was reported with them.
            part = replace(part, metrics={})
        manifest = self.manager.of_state(part, is_rescue=not written.is_report)
        self._give_commit(manifest)
        return manifest.directory

    @property
    def unused_number(self) -> int:
        """A number that no checkpoint of this attempt has, and that is higher than all.

        A rank may be staging the one after the highest just now.
        """
        return max(self.manager.next_number, self._highest_staged + 1) + 1

    def done(self, rank: int) -> Failed | None:
        """Note that a rank's training has ended; return the failure if this ends the attempt."""
        if self._tracker is None:
            return None
        self._tracker.done(rank, now=time.monotonic())
        return self.overdue()

    def gone(self, rank: int) -> Failed | None:
        """Note that a rank's process is gone, and that its staged parts are stored or lost.

        Returns:
            The failure if this ends the attempt.
        """
        if rank == 0:
            self._rank_0_is_gone = True
            for number in list(self._waiting):
                self._release(number)
        self.manager.expect_no_more(rank)
        return self._commit_complete(rank)

    def overdue(self) -> Failed | None:
        """Return the failure if a rank doesn't report checkpoints that the others wait for."""
        if self._tracker is None:
            return None
        found = self._tracker.overdue(now=time.monotonic())
        if found is None:
            self.deadlines.set(Deadline.PARTS, self._tracker.deadline)
            return None
        rank, message = found
        self._tracker = None
        self.deadlines.set(Deadline.PARTS, None)
        return _mismatch(message, rank=rank, attempt=self._attempt)

    def _staged(self, part: PartStaged) -> Failed | None:
        rank, number = part.rank, part.checkpoint
        self._highest_staged = max(self._highest_staged, number)
        if self.manager.merges_files and rank != 0:
            self.manager.expect(rank, number)
            self._waiting.setdefault(number, set()).add(rank)
            self._release(number)
        if self.manager.is_over(number):
            # Nothing else comes for it that would be acknowledged.
            self._acknowledge(part.attempt, number, (rank,))
        if self._tracker is None:
            return None
        self._tracker.part_staged(rank, waits=part.waits, now=time.monotonic())
        return self.overdue()

    def _stored(self, part: PartStored) -> Failed | None:
        try:
            self.manager.add(part)
        except ValueError as error:
            return _mismatch(str(error), rank=part.rank, attempt=part.attempt)
        self._warn_of_files(part)
        if self._tracker is not None and part.files:
            self._tracker.expect(part.rank)
            self.deadlines.set(Deadline.PARTS, time.monotonic())
        if self.manager.is_committed(part.checkpoint, part.attempt):
            # It adds nothing to the commit.
            self._acknowledge(part.attempt, part.checkpoint, (part.rank,))
        self._release(part.checkpoint)
        return self._commit_complete(part.rank)

    def _commit_complete(self, rank: int) -> Failed | None:
        """Commit complete checkpoints after a rank's part is stored, dropped or given up.

        Returns:
            The failure if the parts don't fit together.
        """
        try:
            while (manifest := self.manager.next_complete()) is not None:
                self._give_commit(manifest)
        except ValueError as error:
            return _mismatch(str(error), rank=rank, attempt=self._attempt)
        return None

    def _give_commit(self, manifest: Manifest) -> None:
        # Request it before the commit, which syncs the journal, so that the request isn't lost.
        if self.attached is not None:
            self.attached.request(manifest)
        commit = partial(self._commit, manifest, self.manager.ranks_of(manifest.number))
        self.background_tasks.submit(commit, attempt=manifest.attempt_id.attempt)

    def _release(self, number: int) -> None:
        """Store the other ranks' parts once rank 0's is stored; drop them if it won't be."""
        files = self.manager.stored_files(number)
        if files is None and not self._rank_0_is_gone and not self.manager.is_over(number):
            return
        ranks = self._waiting.pop(number, None)
        if ranks:
            call = StoreRest(attempt=self._attempt, checkpoint=number, stored_already=files)
            self.group.call(call, ranks)

    def _acknowledge(self, attempt: int, checkpoint: int, ranks: Collection[int]) -> None:
        self.group.call(Acknowledge(attempt=attempt, checkpoint=checkpoint), ranks)

    def _commit(self, manifest: Manifest, ranks: frozenset[int]) -> Committed | Failed:
        attempt = manifest.attempt_id.attempt
        try:
            # No driver may resume from a checkpoint whose reports are lost.
            self.journal.sync()
            self.lease.check()
            try:
                return replace(self.manager.commit(manifest), ranks=ranks)
            finally:
                # If this driver was paused meanwhile, its successor decides what is committed.
                self.lease.check()
        except RunOwnedError as error:
            return lease_lost(error, attempt=attempt)
        except (OSError, CheckpointError) as error:
            message = storage_message(error, self.manager.store.location)
            failure = Failure(kind=FailureKind.STORAGE, rank=None, message=message)
            return Failed(attempt=attempt, failure=failure)

    def _committed(self, committed: Committed, good_step: int | None) -> None:
        manifest = committed.manifest
        attempt = manifest.attempt_id.attempt
        is_dropped = self.manager.is_dropped(manifest.number)
        if is_dropped or not is_good(manifest, self.manager.divergences):
            # Meanwhile a part has proved void, or a rank has found that training had diverged.
            self._acknowledge(attempt, manifest.number, committed.ranks)
            self.background_tasks.submit(partial(self._delete, [manifest.directory]))
            return
        is_new = all(known.directory != manifest.directory for known in self.manager.checkpoints)
        info, doomed = self.manager.committed(committed)
        self.journal.write(
            CheckpointCommitted(
                checkpoint=manifest.directory, step=manifest.step, good_step=good_step
            )
        )
        # A validation may still return the metric.
        if not manifest.is_rescue and self.manager.validations.of(manifest.directory) is None:
            self._check_score(manifest.directory, manifest.metrics)
        if is_new:
            self.observers.checkpoint_committed(self.run, info)
        self._warn_of_no_files(manifest)
        added_nothing = self.manager.ranks_that_add_nothing(manifest.number)
        self._acknowledge(attempt, manifest.number, committed.ranks | added_nothing)
        if manifest.attempt_id > AttemptId(token=1, attempt=0) and self._sweeps_are_cheap:
            # A process of an earlier attempt may have been frozen until now.
            self.background_tasks.submit(partial(self._sweep, manifest.attempt_id))
        if doomed:
            self.background_tasks.submit(partial(self._delete, doomed))

    @property
    def _sweeps_are_cheap(self) -> bool:
        """Whether a sweep only lists directory names; object storage lists every file.

        There, late files of a frozen process are deleted when the next attempt or driver starts.
        """
        return self.manager.store.location.is_local

    def all_are_good(self) -> None:
        """Note that all processes are gone: none can find any more that training has diverged."""
        if self.manager.spares_previous:
            self.manager.spares_previous = False
            self._retire()

    def delete_the_rest(self) -> None:
        """Try to delete once more what couldn't be deleted: no commit waits any more."""
        self.background_tasks.submit(self._delete_undeleted)

    def _delete_undeleted(self) -> None:
        undeleted, self._undeleted = self._undeleted, []
        self._delete(undeleted)

    def _retire(self) -> None:
        """Delete the checkpoints that retention doesn't keep."""
        if doomed := self.manager.superseded():
            self.background_tasks.submit(partial(self._delete, doomed))

    def _check_score(self, directory: str, metrics: Mapping[str, Any]) -> None:
        """Warn once if checkpoints can't be ranked as configured."""
        missing = missing_score(metrics, self.manager.config)
        if missing is None or self._has_warned_of_score:
            return
        self._has_warned_of_score = True
        logger.warning(
            "CheckpointConfig.checkpoint_score_attribute=%r doesn't rank the checkpoint %s: %s. "
            "Such a checkpoint counts as the worst.",
            self.manager.config.checkpoint_score_attribute,
            directory,
            missing,
        )

    def _warn_of_files(self, part: PartStored) -> None:
        """Warn once if a file of rank 0 is kept in place of another rank's."""
        if not part.left_out or self._has_warned_of_files:
            return
        self._has_warned_of_files = True
        logger.warning(
            "Ranks 0 and %d reported %r in one checkpoint, with different content: rank 0's is "
            "kept. If the file is the same state on every rank, report it on rank 0 only; if each "
            "rank's counts, give each a name of its own, for example with the rank in it.",
            part.rank,
            part.left_out[0],
        )

    def _warn_of_no_files(self, manifest: Manifest) -> None:
        """Warn once if nothing can start from a checkpoint."""
        if manifest.files or self._has_warned_of_no_files:
            return
        self._has_warned_of_no_files = True
        logger.warning(
            "The checkpoint %s has no files. Write them before report(), or report without a "
            "checkpoint. Older checkpoints are kept until one with files is committed.",
            manifest.directory,
        )

    def _warn_of_lost_steps(self, attempt: int, start: StartingPoint) -> None:
        """Warn if a start has no checkpoint, so that all training is repeated."""
        if not start.own and self.manager.nothing_good:
            logger.warning("Training had diverged: %s.", self.manager.nothing_good)
            return
        if attempt == 0 or start.own or self._has_warned_of_lost_steps:
            return
        self._has_warned_of_lost_steps = True
        logger.warning(
            "No checkpoint has been committed: attempt %d starts where the run started. To keep "
            "what is trained, call polytrain.report(metrics, checkpoint=…) in the training "
            "function, or set CheckpointConfig.checkpoint_frequency if there is none.",
            attempt,
        )

    def _void(self, part: PartVoid) -> Failed | None:
        if self.manager.is_last_left(part.checkpoint, part.attempt):
            logger.warning(
                "Checkpoint %d of this run lacks files of rank %d: in its part, %s. The checkpoint "
                "is kept: there is no older one to go back to.",
                part.checkpoint,
                part.rank,
                part.reason,
            )
            self._acknowledge(part.attempt, part.checkpoint, (part.rank,))
            return self._commit_complete(part.rank)
        self.journal.write(
            CheckpointDropped(
                attempt=part.attempt,
                checkpoint=part.checkpoint,
                rank=part.rank,
                reason=part.reason,
            )
        )
        logger.warning(
            "Checkpoint %d of this run is left out: in rank %d's part, %s.",
            part.checkpoint,
            part.rank,
            part.reason,
        )
        directory = self.manager.drop(part.checkpoint, part.attempt)
        self._release(part.checkpoint)
        if directory is not None:
            self.background_tasks.submit(partial(self._delete, [directory]))
        everybody = range(self.manager.world_size)
        self._acknowledge(part.attempt, part.checkpoint, everybody)
        return self._commit_complete(part.rank)

    def _delete(self, directories: Sequence[str]) -> None:
        """Delete checkpoints, and try one again that couldn't be deleted before."""
        again, self._undeleted = self._undeleted[:1], self._undeleted[1:]
        store = self._without_retry()
        for directory in (*again, *directories):
            try:
                # Another driver's run may have started from it.
                self.lease.check()
                store.delete(directory)
            except RunOwnedError as error:
                logger.warning("The checkpoint %s isn't deleted: %s", directory, error)
            except OSError as error:
                self._undeleted.append(directory)
                logger.warning("The checkpoint %s can't be deleted: %s", directory, error)

    def _sweep(self, attempt_id: AttemptId) -> None:
        try:
            known = {each.directory for each in self.manager.checkpoints}
            self._without_retry().sweep(before=attempt_id, known=known)
        except OSError as error:
            logger.warning("What earlier attempts have left can't be deleted: %s", error)

    def _without_retry(self) -> CheckpointStore:
        """Open the store for deletions: commits, which wait for their thread, are more urgent."""
        location = self.manager.store.location
        return CheckpointStore(location=replace(location, retry_s=0))

    def _id_of(self, attempt: int) -> AttemptId:
        return AttemptId(token=self.manager.token, attempt=attempt)


def lease_lost(error: RunOwnedError, *, attempt: int) -> Failed:
    """Return the failure of a driver that has lost the lease to another one."""
    failure = Failure(kind=FailureKind.LEASE_LOST, rank=None, message=str(error))
    return Failed(attempt=attempt, failure=failure)


def _mismatch(message: str, *, rank: int, attempt: int) -> Failed:
    failure = Failure(kind=FailureKind.CHECKPOINT_MISMATCH, rank=rank, message=message)
    return Failed(attempt=attempt, failure=failure)
