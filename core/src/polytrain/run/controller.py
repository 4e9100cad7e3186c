"""The controller: asks the state machine what to do, and does it, in the process of `fit()`."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from polytrain.checkpoint.events import (
    CheckpointEvent,
    Committed,
    FilesIgnored,
    PartStored,
    PartVoid,
)
from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import AttemptId, Manifest
from polytrain.checkpoint.part_tracker import PartTracker
from polytrain.checkpoint.parts import storage_message
from polytrain.checkpoint.rank_files import RankFiles
from polytrain.common.errors import CheckpointError, Failure, FailureKind, RunOwnedError
from polytrain.common.events import Done, Event, Exited, Failed, Joined, Purpose, Reported
from polytrain.common.output import Output
from polytrain.monitoring.health_events import HealthEvent
from polytrain.run.actions import (
    AcquireWorkers,
    Action,
    AddCheckpoint,
    AddPart,
    Conclude,
    CountPart,
    Drain,
    DropCheckpoint,
    EndAttempt,
    Kill,
    Launch,
    Leave,
    Publish,
    SendRoster,
)
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.health_monitor import HealthMonitor
from polytrain.run.journal import Journal
from polytrain.run.lease import Lease
from polytrain.run.machine import begin, step
from polytrain.run.states import Ending, Gathering, Leaving, State, Training
from polytrain.run.transition import Transition
from polytrain.ui.observers import Observers
from polytrain.ui.progress import WorkerOutput
from polytrain.workers.group import Happening, WorkerGroup
from polytrain.workers.job import LaunchOrder
from polytrain_plugins import Attempt, CheckpointKind, Outcome, Report, RunInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Controller:
    """One run, from this driver's first event to its last."""

    run: RunInfo
    state: State
    group: WorkerGroup
    manager: CheckpointManager
    lease: Lease
    journal: Journal
    background_tasks: BackgroundTasks
    observers: Observers
    output: WorkerOutput
    health_monitor: HealthMonitor
    history: list[Reported] = field(default_factory=list)
    """What rank 0 has reported and no restart has undone, by earlier drivers too."""

    _part_tracker: PartTracker | None = None
    _rank_files: RankFiles | None = None
    """Only where nobody has said whose files are kept."""

    _attempt: Attempt = field(
        default_factory=lambda: Attempt(number=0, checkpoint=None, num_workers=0)
    )
    _conclusion: Conclude | None = None
    _held_back: list[Event | CheckpointEvent] = field(default_factory=list)
    """What has happened to ranks while they were looked into: the reason for that comes first."""

    _asked: queue.SimpleQueue[Event | CheckpointEvent] = field(default_factory=queue.SimpleQueue)

    def ask(self, event: Event | CheckpointEvent) -> None:
        """Have an event handled soon. From any thread, and from a signal's handler."""
        self._asked.put(event)
        self.group.wake()

    def conclude(self) -> Conclude:
        """Run to the end, and say how it ended."""
        self.lease.notify(self.group.wake)
        self._follow(None, begin(self.state))
        while self._conclusion is None:
            self.group.wait(self._handle, self._wait_limit())
            self._take_results()
            self._look_who_is_behind()
            self._look_who_hangs()
        self.background_tasks.finish()
        self.journal.concluded(self._conclusion)
        return self._conclusion

    def _handle(self, happening: Happening) -> None:
        if isinstance(happening, Output):
            self.output.write(happening)
            return
        if isinstance(happening, HealthEvent):
            wanted = self.health_monitor.take(happening)
            if wanted is not None:
                self._happen(wanted)
            return
        if isinstance(happening, FilesIgnored):
            self._compare_files(happening)
            return
        if self.health_monitor.may_have_caused(happening):
            self._held_back.append(happening)
            return
        if isinstance(happening, Joined):
            self.health_monitor.take(happening)
        if isinstance(happening, Exited) and isinstance(self.state.phase, Leaving | Ending):
            # What was handed over counts before its end does: it may be what to start from, and a
            # commit that fails now fails the run.
            self.background_tasks.finish()
            self._take_results()
        if isinstance(happening, Done) and self._part_tracker is not None:
            self._part_tracker.done(happening.rank, now=time.monotonic())
            self._look_who_is_behind()
        self._happen(happening)
        # Inline, they are there at once.
        self._take_results()

    def _take_results(self) -> None:
        for event in self.background_tasks.results():
            self._happen(event)
        if self.lease.lost is not None and isinstance(self.state.phase, Gathering | Training):
            self._fail(self._lease_lost(self.lease.lost), self.state.attempt)
        while not self._asked.empty():
            self._happen(self._asked.get())

    def _happen(self, event: Event | CheckpointEvent) -> None:
        self._follow(event, step(self.state, event, now=time.monotonic()))

    def _follow(self, event: Event | CheckpointEvent | None, transition: Transition) -> None:
        self.journal.transition(event, transition)
        # Before the actions: inline, what an action starts leads to the next event at once.
        self.state = transition.state
        for action in transition.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case AcquireWorkers(avoid=avoid, without=without):
                self.group.place(avoid=avoid, without=without)
            case Launch(attempt=attempt):
                self._launch(attempt)
            case SendRoster(attempt=attempt, offers=offers):
                self.group.send_roster(attempt, offers)
            case Publish(report=report):
                self._publish(report)
            case CountPart(part=part):
                if self._part_tracker is not None:
                    now = time.monotonic()
                    self._part_tracker.part_staged(part.rank, waits=part.waits, now=now)
                    self._look_who_is_behind()
            case AddPart(part=part):
                self._add_part(part)
            case DropCheckpoint(part=part):
                self._drop_checkpoint(part)
            case AddCheckpoint(committed=committed):
                self._add_checkpoint(committed)
            case Drain(attempt=attempt):
                self._drain(attempt)
            case Leave(attempt=attempt):
                self.group.leave(attempt)
            case Kill(attempt=attempt):
                # What workers write from now on is about the peer that they have lost; what they
                # have written may be the reason.
                self.output.flush()
                self.output.muted = True
                self.group.kill(attempt)
            case EndAttempt(root=root, reason=reason):
                self.journal.attempt_ended(action)
                told = reason if root is None else f"{root} ({reason})"
                self._end_attempt(succeeded=False, planned=root is None, reason=told)
            case Conclude():
                if action.succeeded:
                    self._end_attempt(succeeded=True, planned=True, reason=action.reason)
                self._conclusion = action
            case _:
                assert_never(action)

    def _launch(self, attempt: int) -> None:
        manager, world_size = self.manager, self.state.world_size
        attempt_id = AttemptId(token=manager.token, attempt=attempt)
        # A commit that is still on its way is what to resume from.
        self.background_tasks.finish()
        self._take_results()
        manager.forget_parts()
        manager.store.clear_staging(before=attempt_id)
        start = manager.start()
        # What came after the checkpoint is done, and reported, once more.
        self.history = [report for report in self.history if report.step <= start.step]
        manager.world_size = world_size
        self.journal.launched(
            attempt=attempt, step=start.step, start=start.path, world_size=world_size
        )
        self.background_tasks.give(partial(_sweep, manager, attempt_id))
        # A driver that died had no time for these.
        for directory in manager.superseded():
            self.background_tasks.give(partial(_delete, manager, directory))
        if manager.kind is CheckpointKind.EVERY_RANK:
            self._part_tracker = PartTracker(world_size, manager.config.report_timeout_s)
        elif manager.config.written_by is None:
            self._rank_files = RankFiles()
        self.health_monitor.launched(attempt, world_size=self.state.world_size)
        self.output.flush()
        self.output.muted = False
        self._attempt = Attempt(number=attempt, checkpoint=start.path, num_workers=world_size)
        self.observers.attempt_started(self.run, self._attempt)
        self.group.launch(
            LaunchOrder(
                attempt_id=attempt_id,
                members=self.group.members,
                start=start,
                first_checkpoint=manager.next_number,
            )
        )

    def _drain(self, attempt: int) -> None:
        drain = self.state.drain
        if drain is not None and drain.purpose is Purpose.STOP:
            logger.warning(
                "The run is %s: it ends after its next checkpoint, and can be resumed. A "
                "second signal ends it at once.",
                drain.reason,
            )
        self.group.drain(attempt)

    def _publish(self, report: Reported) -> None:
        if report.rank != 0:
            return
        self.history.append(report)
        self.journal.reported(report)
        told = Report(
            rank=report.rank,
            attempt=report.attempt,
            step=report.step,
            metrics=report.metrics,
        )
        self.observers.reported(self.run, told)

    def _compare_files(self, ignored: FilesIgnored) -> None:
        if self._rank_files is None or ignored.attempt != self.state.attempt:
            return
        lost = self._rank_files.ignored(ignored.step, ignored.rank, ignored.names)
        if lost is not None:
            self._fail(_mismatch(lost, rank=ignored.rank), ignored.attempt)

    def _add_part(self, part: PartStored) -> None:
        if self._rank_files is not None and part.attempt == self.state.attempt:
            lost = self._rank_files.kept(part.step, [file.name for file in part.files])
            if lost is not None:
                self._fail(_mismatch(lost, rank=part.rank), part.attempt)
                return
        try:
            manifest = self.manager.add(part)
        except ValueError as error:
            self._fail(_mismatch(str(error), rank=part.rank), part.attempt)
            return
        if manifest is not None:
            self.background_tasks.give(partial(self._commit, manifest))

    def _commit(self, manifest: Manifest) -> Event | CheckpointEvent:
        try:
            # Nobody is to resume from a checkpoint whose reports are lost.
            self.journal.sync()
            self.lease.check()
            return self.manager.commit(manifest)
        except RunOwnedError as error:
            return Failed(attempt=manifest.attempt_id.attempt, failure=self._lease_lost(error))
        except (OSError, CheckpointError) as error:
            failure = Failure(
                kind=FailureKind.STORAGE,
                rank=None,
                message=storage_message(error, self.manager.store.location),
            )
            return Failed(attempt=manifest.attempt_id.attempt, failure=failure)

    @staticmethod
    def _lease_lost(error: RunOwnedError) -> Failure:
        return Failure(kind=FailureKind.LEASE_LOST, rank=None, message=str(error))

    def _add_checkpoint(self, committed: Committed) -> None:
        info, doomed = self.manager.committed(committed)
        manifest = committed.manifest
        self.observers.checkpoint_committed(self.run, info)
        self.group.acknowledge(manifest.attempt_id.attempt, manifest.number)
        if manifest.attempt_id > AttemptId(token=1, attempt=0):
            # A writer of an earlier attempt may have been frozen until now.
            self.background_tasks.give(partial(_sweep, self.manager, manifest.attempt_id))
        for directory in doomed:
            self.background_tasks.give(partial(_delete, self.manager, directory))

    def _drop_checkpoint(self, part: PartVoid) -> None:
        logger.warning(
            "Checkpoint %d of this run is left out: of rank %d's part %s.",
            part.checkpoint,
            part.rank,
            part.reason,
        )
        self.manager.drop(part.checkpoint)
        self.group.acknowledge(part.attempt, part.checkpoint)

    def _wait_limit(self) -> float | None:
        """Seconds until somebody may have something to say though nothing happens."""
        watchers = (self._part_tracker, self.health_monitor)
        deadlines = [watcher.deadline for watcher in watchers if watcher is not None]
        nearest = min((at for at in deadlines if at is not None), default=None)
        return None if nearest is None else max(0.0, nearest - time.monotonic())

    def _look_who_is_behind(self) -> None:
        """End the attempt if a rank doesn't make the reports that the others wait for."""
        if self._part_tracker is None:
            return
        overdue = self._part_tracker.overdue(now=time.monotonic())
        if overdue is not None:
            rank, message = overdue
            self._part_tracker = None
            self._fail(_mismatch(message, rank=rank), self.state.attempt)

    def _look_who_hangs(self) -> None:
        """End the attempt if its ranks don't meet, or hang."""
        failure = self.health_monitor.look(self.state)
        if failure is not None:
            self._fail(failure, self.state.attempt)
        held_back, self._held_back = self._held_back, []
        for event in held_back:
            self._handle(event)

    def _fail(self, failure: Failure, attempt: int) -> None:
        self._happen(Failed(attempt=attempt, failure=failure))

    def _end_attempt(self, *, succeeded: bool, planned: bool, reason: str) -> None:
        last = self.state.attempts[-1:]
        if any(attempt.root.kind is FailureKind.STORAGE for attempt in last):
            self.manager.distrust()
        outcome = Outcome(
            succeeded=succeeded, planned=planned, reason=reason, restarts=self.state.restarts
        )
        self.observers.attempt_ended(self.run, self._attempt, outcome)


def _mismatch(message: str, *, rank: int) -> Failure:
    return Failure(kind=FailureKind.CHECKPOINT_MISMATCH, rank=rank, message=message)


def _sweep(manager: CheckpointManager, attempt_id: AttemptId) -> None:
    try:
        manager.store.sweep(before=attempt_id)
    except OSError as error:
        logger.warning("What earlier attempts have left can't be deleted: %s", error)


def _delete(manager: CheckpointManager, directory: str) -> None:
    try:
        manager.store.delete(directory)
    except OSError as error:
        logger.warning("The checkpoint %s can't be deleted: %s", directory, error)
