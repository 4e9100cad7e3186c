"""The controller: asks the state machine what to do, and does it, in the process of `fit()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from polytrain.checkpoint.keeper import CheckpointKeeper
from polytrain.errors import Failure, FailureKind
from polytrain.reporting.observers import Observers
from polytrain.reporting.progress import TrainerOutput
from polytrain.run.actions import (
    Action,
    AddPart,
    Conclude,
    EndAttempt,
    Kill,
    Launch,
    Leave,
    Place,
    Publish,
    SendRoster,
)
from polytrain.run.events import Event, Failed, PartStored, Reported
from polytrain.run.journal import Journal
from polytrain.run.machine import Transition, begin, step
from polytrain.run.states import State
from polytrain.workers.group import WorkerGroup
from polytrain.workers.job import LaunchOrder
from polytrain.workers.output import Output
from polytrain_plugins import Attempt, Outcome, Report, RunInfo


@dataclass(slots=True, kw_only=True)
class Controller:
    """One run, from the first event to the last."""

    run: RunInfo
    state: State
    group: WorkerGroup
    keeper: CheckpointKeeper
    journal: Journal
    observers: Observers
    output: TrainerOutput
    history: list[Reported] = field(default_factory=list)
    """What rank 0 has reported and no restart has undone."""

    _attempt: Attempt = field(default_factory=lambda: Attempt(generation=0, checkpoint=None))
    _conclusion: Conclude | None = None

    def conclude(self) -> Conclude:
        """Run to the end, and say how it ended."""
        self._follow(None, begin(self.state))
        while self._conclusion is None:
            self.group.wait(self._handle)
        return self._conclusion

    def _handle(self, happening: Event | Output) -> None:
        if isinstance(happening, Output):
            self.output.write(happening)
        else:
            self._follow(happening, step(self.state, happening))

    def _follow(self, event: Event | None, transition: Transition) -> None:
        self.journal.transition(event, transition)
        # Before the actions: inline, what an action starts leads to the next event at once.
        self.state = transition.state
        for action in transition.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Place():
                self.group.place()
            case Launch(generation=generation):
                self._launch(generation)
            case SendRoster(generation=generation, offers=offers):
                self.group.send_roster(generation, offers)
            case Publish(report=report):
                self._publish(report)
            case AddPart(part=part):
                self._add_part(part)
            case Leave(generation=generation):
                self.group.leave(generation)
            case Kill(generation=generation):
                # What trainers write from now on is about the peer that they have lost; what they
                # have written may be the reason.
                self.output.flush()
                self.output.muted = True
                self.group.kill(generation)
            case EndAttempt():
                self._end_attempt(succeeded=False, reason=action.reason)
            case Conclude():
                if action.succeeded:
                    self._end_attempt(succeeded=True, reason=action.reason)
                self._conclusion = action
            case _:
                assert_never(action)

    def _launch(self, generation: int) -> None:
        start = self.keeper.start()
        # What came after the checkpoint is done, and reported, once more.
        self.history = [report for report in self.history if report.step <= start.step]
        self.keeper.store.sweep()
        self.output.flush()
        self.output.muted = False
        self._attempt = Attempt(generation=generation, checkpoint=start.path)
        self.observers.attempt_started(self.run, self._attempt)
        self.group.launch(
            LaunchOrder(
                generation=generation,
                members=self.group.members,
                start=start,
                first_checkpoint=self.keeper.next_number,
            )
        )

    def _publish(self, report: Reported) -> None:
        if report.rank != 0:
            return
        self.history.append(report)
        told = Report(
            rank=report.rank,
            generation=report.generation,
            step=report.step,
            metrics=report.metrics,
        )
        self.observers.reported(self.run, told)

    def _add_part(self, part: PartStored) -> None:
        try:
            committed = self.keeper.add(part)
        except OSError as error:
            failure = Failure(kind=FailureKind.STORAGE, rank=None, message=str(error))
            self._handle(Failed(generation=part.generation, failure=failure))
            return
        if committed is not None:
            self.observers.checkpoint_committed(self.run, committed)

    def _end_attempt(self, *, succeeded: bool, reason: str) -> None:
        outcome = Outcome(succeeded=succeeded, reason=reason, restarts=self.state.restarts)
        self.observers.attempt_ended(self.run, self._attempt, outcome)
