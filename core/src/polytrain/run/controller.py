"""The controller: asks the state machine what to do, and does it, in the process of `fit()`."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from polytrain.checkpoint.attendance import Attendance
from polytrain.checkpoint.keeper import CheckpointKeeper
from polytrain.checkpoint.manifest import Attempt, Manifest
from polytrain.checkpoint.parts import storage_message
from polytrain.errors import CheckpointError, Failure, FailureKind, RunOwnedError
from polytrain.reporting.observers import Observers
from polytrain.reporting.progress import TrainerOutput
from polytrain.run.actions import (
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
    Place,
    Publish,
    SendRoster,
)
from polytrain.run.chores import Chores
from polytrain.run.claim import Claim
from polytrain.run.events import (
    Committed,
    Done,
    Event,
    Exited,
    Failed,
    Joined,
    PartStored,
    PartVoid,
    Purpose,
    Reported,
)
from polytrain.run.journal import Journal
from polytrain.run.lookout import Lookout
from polytrain.run.machine import begin, step
from polytrain.run.signs import Sign
from polytrain.run.states import Ending, Leaving, State
from polytrain.run.transition import Transition
from polytrain.workers.group import Happening, WorkerGroup
from polytrain.workers.job import LaunchOrder
from polytrain.workers.output import Output
from polytrain_plugins import Attempt as ToldAttempt
from polytrain_plugins import CheckpointKind, Outcome, Report, RunInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Controller:
    """One run, from this driver's first event to its last."""

    run: RunInfo
    state: State
    group: WorkerGroup
    keeper: CheckpointKeeper
    claim: Claim
    journal: Journal
    chores: Chores
    observers: Observers
    output: TrainerOutput
    lookout: Lookout
    history: list[Reported] = field(default_factory=list)
    """What rank 0 has reported and no restart has undone, by earlier drivers too."""

    _attendance: Attendance | None = None
    _attempt: ToldAttempt = field(
        default_factory=lambda: ToldAttempt(generation=0, checkpoint=None, num_workers=0)
    )
    _conclusion: Conclude | None = None
    _held_back: list[Event] = field(default_factory=list)
    """What has happened to ranks while they were looked into: the reason for that comes first."""

    _asked: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def ask(self, event: Event) -> None:
        """Have an event handled soon. From any thread, and from a signal's handler."""
        self._asked.put(event)
        self.group.wake()

    def conclude(self) -> Conclude:
        """Run to the end, and say how it ended."""
        self._follow(None, begin(self.state))
        while self._conclusion is None:
            self.group.wait(self._handle, self._patience())
            self._take_results()
            self._look_who_is_behind()
            self._look_who_hangs()
        self.chores.finish()
        self.journal.concluded(self._conclusion)
        return self._conclusion

    def _handle(self, happening: Happening) -> None:
        if isinstance(happening, Output):
            self.output.write(happening)
            return
        if isinstance(happening, Sign):
            wanted = self.lookout.take(happening)
            if wanted is not None:
                self._happen(wanted)
            return
        if self.lookout.may_have_caused(happening):
            self._held_back.append(happening)
            return
        if isinstance(happening, Joined):
            self.lookout.take(happening)
        if isinstance(happening, Exited) and isinstance(self.state.phase, Leaving | Ending):
            # What was handed over counts before its end does: it may be what to start from, and a
            # commit that fails now fails the run.
            self.chores.finish()
            self._take_results()
        if isinstance(happening, Done) and self._attendance is not None:
            self._attendance.done(happening.rank, now=time.monotonic())
            self._look_who_is_behind()
        self._happen(happening)
        # Inline, they are there at once.
        self._take_results()

    def _take_results(self) -> None:
        for event in self.chores.results():
            self._happen(event)
        while not self._asked.empty():
            self._happen(self._asked.get())

    def _happen(self, event: Event) -> None:
        self._follow(event, step(self.state, event, now=time.monotonic()))

    def _follow(self, event: Event | None, transition: Transition) -> None:
        self.journal.transition(event, transition)
        # Before the actions: inline, what an action starts leads to the next event at once.
        self.state = transition.state
        for action in transition.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Place(avoid=avoid, without=without):
                self.group.place(avoid=avoid, without=without)
            case Launch(generation=generation):
                self._launch(generation)
            case SendRoster(generation=generation, offers=offers):
                self.group.send_roster(generation, offers)
            case Publish(report=report):
                self._publish(report)
            case CountPart(part=part):
                if self._attendance is not None:
                    now = time.monotonic()
                    self._attendance.handed_in(part.rank, waits=part.waits, now=now)
                    self._look_who_is_behind()
            case AddPart(part=part):
                self._add_part(part)
            case DropCheckpoint(part=part):
                self._drop_checkpoint(part)
            case AddCheckpoint(committed=committed):
                self._add_checkpoint(committed)
            case Drain(generation=generation):
                self._drain(generation)
            case Leave(generation=generation):
                self.group.leave(generation)
            case Kill(generation=generation):
                # What trainers write from now on is about the peer that they have lost; what they
                # have written may be the reason.
                self.output.flush()
                self.output.muted = True
                self.group.kill(generation)
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

    def _launch(self, generation: int) -> None:
        keeper, world_size = self.keeper, self.state.world_size
        attempt = Attempt(claim=keeper.claim, generation=generation)
        # A commit that is still on its way is what to go on from.
        self.chores.finish()
        self._take_results()
        keeper.forget_parts()
        keeper.store.clear_staging(before=attempt)
        start = keeper.start()
        # What came after the checkpoint is done, and reported, once more.
        self.history = [report for report in self.history if report.step <= start.step]
        keeper.world_size = world_size
        self.journal.launched(
            generation=generation, step=start.step, start=start.path, world_size=world_size
        )
        self.chores.give(partial(_sweep, keeper, attempt))
        # A driver that died had no time for these.
        for directory in keeper.superseded():
            self.chores.give(partial(_delete, keeper, directory))
        if keeper.kind is CheckpointKind.EVERY_RANK:
            self._attendance = Attendance(world_size, keeper.config.report_timeout_s)
        self.lookout.launched(generation, world_size=self.state.world_size)
        self.output.flush()
        self.output.muted = False
        self._attempt = ToldAttempt(
            generation=generation, checkpoint=start.path, num_workers=world_size
        )
        self.observers.attempt_started(self.run, self._attempt)
        self.group.launch(
            LaunchOrder(
                attempt=attempt,
                members=self.group.members,
                start=start,
                first_checkpoint=keeper.next_number,
            )
        )

    def _drain(self, generation: int) -> None:
        drain = self.state.drain
        if drain is not None and drain.purpose is Purpose.STOP:
            logger.warning(
                "The run is %s: it ends after its next checkpoint, and can be gone on with. A "
                "second signal ends it at once.",
                drain.reason,
            )
        self.group.drain(generation)

    def _publish(self, report: Reported) -> None:
        if report.rank != 0:
            return
        self.history.append(report)
        self.journal.reported(report)
        told = Report(
            rank=report.rank,
            generation=report.generation,
            step=report.step,
            metrics=report.metrics,
        )
        self.observers.reported(self.run, told)

    def _add_part(self, part: PartStored) -> None:
        try:
            manifest = self.keeper.add(part)
        except ValueError as error:
            kind = FailureKind.UNMATCHED_PARTS
            failure = Failure(kind=kind, rank=part.rank, message=str(error))
            self._fail(failure, part.generation)
            return
        if manifest is not None:
            self.chores.give(partial(self._commit, manifest))

    def _commit(self, manifest: Manifest) -> Event:
        try:
            # Nobody is to go on from a checkpoint whose reports are lost.
            self.journal.sync()
            self.claim.check()
            return self.keeper.commit(manifest)
        except (OSError, CheckpointError, RunOwnedError) as error:
            failure = Failure(
                kind=FailureKind.STORAGE,
                rank=None,
                message=storage_message(error, self.keeper.store.location),
            )
            return Failed(generation=manifest.attempt.generation, failure=failure)

    def _add_checkpoint(self, committed: Committed) -> None:
        info, doomed = self.keeper.committed(committed)
        manifest = committed.manifest
        self.observers.checkpoint_committed(self.run, info)
        self.group.acknowledge(manifest.attempt.generation, manifest.number)
        for directory in doomed:
            self.chores.give(partial(_delete, self.keeper, directory))

    def _drop_checkpoint(self, part: PartVoid) -> None:
        logger.warning(
            "Checkpoint %d of this run is left out: of rank %d's part %s.",
            part.checkpoint,
            part.rank,
            part.reason,
        )
        self.keeper.drop(part.checkpoint)
        self.group.acknowledge(part.generation, part.checkpoint)

    def _patience(self) -> float | None:
        """Seconds until somebody may have something to say though nothing happens."""
        watchers = (self._attendance, self.lookout)
        deadlines = [watcher.deadline for watcher in watchers if watcher is not None]
        nearest = min((at for at in deadlines if at is not None), default=None)
        return None if nearest is None else max(0.0, nearest - time.monotonic())

    def _look_who_is_behind(self) -> None:
        """End the attempt if a rank doesn't make the reports that the others wait for."""
        if self._attendance is None:
            return
        complaint = self._attendance.complaint(now=time.monotonic())
        if complaint is not None:
            rank, message = complaint
            self._attendance = None
            kind = FailureKind.UNMATCHED_PARTS
            failure = Failure(kind=kind, rank=rank, message=message)
            self._fail(failure, self.state.generation)

    def _look_who_hangs(self) -> None:
        """End the attempt if its ranks don't meet, or hang."""
        failure = self.lookout.look(self.state)
        if failure is not None:
            self._fail(failure, self.state.generation)
        held_back, self._held_back = self._held_back, []
        for event in held_back:
            self._handle(event)

    def _fail(self, failure: Failure, generation: int) -> None:
        self._happen(Failed(generation=generation, failure=failure))

    def _end_attempt(self, *, succeeded: bool, planned: bool, reason: str) -> None:
        last = self.state.attempts[-1:]
        if any(attempt.root.kind is FailureKind.STORAGE for attempt in last):
            self.keeper.distrust()
        outcome = Outcome(
            succeeded=succeeded, planned=planned, reason=reason, restarts=self.state.restarts
        )
        self.observers.attempt_ended(self.run, self._attempt, outcome)


def _sweep(keeper: CheckpointKeeper, attempt: Attempt) -> None:
    try:
        keeper.store.sweep(before=attempt)
    except OSError as error:
        logger.warning("What earlier attempts have left can't be deleted: %s", error)


def _delete(keeper: CheckpointKeeper, directory: str) -> None:
    try:
        keeper.store.delete(directory)
    except OSError as error:
        logger.warning("The checkpoint %s can't be deleted: %s", directory, error)
