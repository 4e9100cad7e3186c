"""The controller: passes events to the state machine, and carries out its actions.

It blocks on one mailbox. There arrive the events of agents, and those of the driver's own threads
(`polytrain.events.driver`). What is late is found by deadlines.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import assert_never

from polytrain.checkpoint.parts import CheckpointEvent, CheckpointsAsked, Committed, PartVoid
from polytrain.errors import RunOwnedError
from polytrain.events.attempt import (
    AgentLost,
    Diverged,
    Done,
    DrainWanted,
    Event,
    ExactnessFound,
    Exited,
    Failed,
    HealthEvent,
    Joined,
    Reported,
    Stacks,
    StateDigested,
    stop_wanted,
)
from polytrain.events.driver import (
    DriverEvent,
    GitAnswered,
    Interrupted,
    LeaseLost,
    StacksWanted,
    TaskEnded,
    WorkEnded,
)
from polytrain.events.output import BarMoved, Output
from polytrain.output.worker_output import WorkerOutput
from polytrain.policy.divergence import DivergenceRule
from polytrain.policy.stop_rule import StopRule
from polytrain.record.entries import CodeContent, RunConcluded
from polytrain.record.journal import Journal
from polytrain.run.attempts import end, launch, without_lease
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.checkpoint_coordinator import CheckpointCoordinator, lease_lost
from polytrain.run.config_changes import ConfigChanges
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.health_monitor import HealthMonitor, StacksAnswers
from polytrain.run.interrupts import Interrupts
from polytrain.run.lease import Lease
from polytrain.run.left_state import commit_state
from polytrain.run.machine import begin, note, step, taken_back
from polytrain.run.program import CommitSearch
from polytrain.run.publisher import Publisher
from polytrain.run.states import (
    AcquireWorkers,
    Action,
    Conclude,
    Concluded,
    EndAttempt,
    Ending,
    Gathering,
    Launch,
    Placing,
    State,
    Training,
    Transition,
    entries_of,
)
from polytrain.run.survivors import Survivors
from polytrain.run.validation_results import ValidationResults
from polytrain.workers.agents.calls import (
    AgentEvent,
    DrainAttempt,
    Kill,
    Leave,
    SendRoster,
    SurvivorEvent,
)
from polytrain.workers.driver.group import Mailbox, WorkerGroup

logger = logging.getLogger(__name__)

_GIT_WITHIN_S = 1.0
"""Seconds that the end of a run waits for git."""


@dataclass(slots=True, kw_only=True)
class Controller:
    """One run, from this driver's first event to its last."""

    state: State
    group: WorkerGroup
    checkpoints: CheckpointCoordinator
    lease: Lease
    journal: Journal
    background_tasks: BackgroundTasks
    publisher: Publisher
    output: WorkerOutput
    health_monitor: HealthMonitor
    survivors: Survivors
    stacks_answers: StacksAnswers
    mailbox: Mailbox
    deadlines: Deadlines
    validation_results: ValidationResults = field(default_factory=ValidationResults)
    commit_search: CommitSearch | None = None
    stop_rule: StopRule = field(default_factory=StopRule)
    config_changes: ConfigChanges | None = None
    """What `on_rollback` changes for later attempts; None without it."""

    virtual_workers: int | None = None
    code_after: Callable[[], CodeContent | None] = lambda: None
    """Returns `RunConcluded.code` once training has ended."""

    divergence_rule: DivergenceRule | None = None
    """What counts as divergence, which the ranks find; None if nothing does."""

    interrupts: Interrupts = field(default_factory=Interrupts)
    """Lets signals interrupt only code that waits."""

    _conclusion: Conclude | None = None
    _acquired: AcquireWorkers = field(default_factory=AcquireWorkers)
    """The latest request for workers, which may be paced."""

    _last_gone: Exited | AgentLost | None = None
    """The end of the attempt's last process, which waits until copies of the state are stored."""

    _held_back: list[Event] = field(default_factory=list)
    """Events deferred while stacks are dumped: the reason for the dump is handled first."""

    def conclude(self) -> Conclude:
        """Run to the end, and return the conclusion."""
        self._follow(None, begin(self.state))
        # Earlier drivers may have left checkpoints to validate.
        self.validation_results.take(self)
        while self._conclusion is None:
            with self.interrupts.allowed():
                self.group.wait(self.take, self.deadlines.left_s(time.monotonic()))
            for deadline in self.deadlines.passed(time.monotonic()):
                self._take_deadline(deadline)
        self.checkpoints.all_are_good()
        conclusion = self.validation_results.concluded(self, self._conclusion)
        self.checkpoints.delete_the_rest()
        with self.interrupts.allowed():
            self.background_tasks.finish()
        if conclusion.succeeded and conclusion.stopped is None:
            self.journal.returned(self.publisher.returned)
        self._note_commit(within_s=_GIT_WITHIN_S)
        self.journal.write(
            RunConcluded(
                succeeded=conclusion.succeeded,
                stopped=conclusion.stopped,
                reason=conclusion.reason,
                validation_failure=conclusion.validation_failure,
                code=self.code_after() if conclusion.succeeded else None,
                why_not_exact=self.journal.history.why_not_exact,
            )
        )
        return conclusion

    def settle(self) -> None:
        """Wait for the background tasks that an attempt needs, and handle their results."""
        with self.interrupts.allowed():
            self.background_tasks.finish_needed()
        self.take_results()

    def take(self, event: AgentEvent | DriverEvent) -> None:
        """Handle an event; signals wait meanwhile."""
        with self.interrupts.deferred():
            self._handle(event)

    def _handle(self, event: AgentEvent | DriverEvent) -> None:
        if isinstance(event, Reported):
            self._take_report(event)
        elif isinstance(event, CheckpointEvent):
            self._take_checkpoint_event(event)
        elif isinstance(event, DriverEvent):
            self._handle_own(event)
        elif isinstance(event, Output):
            self.output.write(event)
        elif isinstance(event, BarMoved):
            if event.attempt == self.state.attempt:
                self.output.show_bars(event)
        elif isinstance(event, HealthEvent):
            if isinstance(event, Stacks):
                self.stacks_answers.take(event)
            wanted = self.health_monitor.take(event)
            if wanted is not None:
                self.happen(wanted)
        elif isinstance(event, SurvivorEvent):
            self.survivors.take(event)
            self._take_last_gone()
        elif isinstance(event, StateDigested):
            if event.attempt == self.state.attempt:
                self.publisher.digested(event)
        elif isinstance(event, ExactnessFound):
            if event.attempt == self.state.attempt:
                self.publisher.checked_exactness(event)
        elif isinstance(event, CheckpointsAsked):
            self.validation_results.asked(self, event)
        elif self.health_monitor.may_have_caused(event):
            self._held_back.append(event)
        else:
            self._handle_of_attempt(event)

    def _handle_of_attempt(self, event: Event) -> None:
        """Handle an event on which the state machine decides."""
        if isinstance(event, DrainWanted) and isinstance(self.state.phase, Concluded):
            # Validations may be left, for which the run would wait.
            self.validation_results.stopped = event.stopped or self.validation_results.stopped
            return
        if isinstance(event, Exited | Done) and event.attempt != self.state.attempt:
            # Its agent was given up. A rank of this attempt has the same number.
            return
        if isinstance(event, Joined | Done):
            self.health_monitor.take(event)
        if isinstance(event, Exited | AgentLost):
            self._fail_if(self.checkpoints.gone(event.rank))
            self.survivors.gone(event.rank)
            if isinstance(event, AgentLost):
                self.survivors.copies_lost(event.rank)
            if self.state.is_last(event.rank):
                number = self.checkpoints.unused_number
                if self.survivors.store_copies(self.state, number=number):
                    self._last_gone = event
                    return
                self._last_gone = None
                # What follows is decided with it.
                self.commit_left_state()
        if isinstance(event, Done):
            self.publisher.done(event)
            self._fail_if(self.checkpoints.done(event.rank))
        self.happen(event)
        if isinstance(event, AgentLost):
            self.survivors.lost(event.rank)
            self._take_last_gone()

    def _handle_own(self, event: DriverEvent) -> None:
        """Handle an event of this driver's own threads."""
        match event:
            case TaskEnded():
                self.take_results()
            case WorkEnded():
                self.validation_results.take(self)
                attached = self.validation_results.attached
                failure = None if attached is None else attached.failure
                if failure is not None and isinstance(self.state.phase, Gathering | Training):
                    self.happen(Failed(attempt=self.state.attempt, failure=failure))
            case LeaseLost():
                if self.lease.lost is not None:
                    self._end_without_lease(self.lease.lost)
            case StacksWanted(request=request):
                state = self.state
                if not isinstance(state.phase, Concluded):
                    self.stacks_answers.wanted(
                        request, attempt=state.attempt, world_size=state.world_size
                    )
            case GitAnswered():
                self._note_commit()
            case Interrupted():
                pass  # The next wait raises the exception.
            case _:
                assert_never(event)

    def _end_without_lease(self, lost: RunOwnedError) -> None:
        """End the run, unless its training is done. Its workers are for the driver that has it."""
        if isinstance(self.state.phase, Gathering | Training | Ending):
            self.happen(lease_lost(lost, attempt=self.state.attempt))
        elif isinstance(self.state.phase, Placing):
            self._end_as(without_lease(lost, self.state.attempt))

    def _end_as(self, conclusion: Conclude) -> None:
        """End the run between two attempts."""
        self.state = replace(self.state, phase=Concluded(succeeded=False))
        self._conclusion = conclusion

    def _take_deadline(self, deadline: Deadline) -> None:
        match deadline:
            case Deadline.PARTS:
                self._fail_if(self.checkpoints.overdue())
            case Deadline.SURVIVORS:
                self.survivors.overdue()
            case Deadline.RANKS:
                self._look_who_hangs()
            case Deadline.STACKS:
                self.stacks_answers.answer()
            case Deadline.PAUSE:
                # A stop may have ended the run meanwhile.
                if isinstance(self.state.phase, Placing):
                    self._place()
            case Deadline.BUDGET:
                self._look_at_budget()
            case _:
                assert_never(deadline)

    def _take_last_gone(self) -> None:
        """Handle the end of the last process, once the copies that it waits for are stored."""
        event = self._last_gone
        if event is not None and not self.survivors.copies.are_stored:
            self._last_gone = None
            with self.interrupts.deferred():
                self.commit_left_state()
                self.happen(event)

    def commit_left_state(self) -> None:
        """Commit the state that the attempt has left, if there is one."""
        written = self.survivors.written(self.state)
        if written is not None:
            commit_state(self, written)

    def take_results(self) -> None:
        """Handle the outcomes of background tasks."""
        for event in self.background_tasks.results():
            if isinstance(event, CheckpointEvent):
                self._take_checkpoint_event(event)
            else:
                self.happen(event)

    def _note_commit(self, *, within_s: float = 0.0) -> None:
        """Note the commit of the driver's code, if git answers in time."""
        if self.commit_search is not None:
            self.commit_search.note(self.journal, within_s=within_s)

    def _look_at_budget(self) -> None:
        """Stop the run if its time is over; else look again when it may be."""
        budget_s, drain = self.stop_rule.time_budget_s, self.state.drain
        is_stopping = drain is not None and drain.stopped is not None
        if budget_s is None or is_stopping or not isinstance(self.state.phase, Training):
            return
        trained_s = self.journal.history.ledger.trained_s(self.journal.clock.now())
        stopped = self.stop_rule.budget_met_by(trained_s, step=self.state.steps.get(0, 0))
        if stopped is None:
            self.deadlines.set(Deadline.BUDGET, time.monotonic() + budget_s - trained_s)
        else:
            self.happen(stop_wanted(stopped))

    def _take_checkpoint_event(self, event: CheckpointEvent) -> None:
        manager = self.checkpoints.manager
        is_dropped = isinstance(event, Committed) and manager.is_dropped(event.manifest.number)
        noted = self.state if is_dropped else note(self.state, event)
        if noted is not None:
            self.state = noted
            failed = self.checkpoints.take(event, good_step=self.state.good_step)
            if isinstance(event, PartVoid):
                self.state = taken_back(
                    self.state, committed=manager.newest_step, progress=manager.progress
                )
            self._fail_if(failed)
            if isinstance(event, Committed):
                self.validation_results.take(self)

    def happen(self, event: Event) -> None:
        """Pass an event to the state machine, and carry out what it answers."""
        transition = step(self.state, event, now=time.monotonic())
        if _ends(transition) and self.background_tasks.have_news:
            # Finish pending commits first: one may be the next starting point, or the progress by
            # which failures are counted, and a commit that fails now fails the run.
            self.settle()
            transition = step(self.state, event, now=time.monotonic())
        self._follow(event, transition)
        if isinstance(event, Diverged):
            self.checkpoints.manager.leave_bad_out()
            # A driver that resumes the run mustn't start with what has diverged.
            self.background_tasks.submit(self.journal.sync)

    def _follow(self, event: Event | None, transition: Transition) -> None:
        for entry in entries_of(event, transition):
            self.journal.write(entry)
        has_moved = type(transition.state.phase) is not type(self.state.phase)
        # Set the state before the actions: in an inline run an action may cause the next event.
        self.state = transition.state
        for action in transition.actions:
            self._do(action)
        if has_moved:
            self.health_monitor.look_soon()
            if self.stop_rule.time_budget_s is not None:
                self.deadlines.set(Deadline.BUDGET, time.monotonic())

    def _do(self, action: Action) -> None:
        match action:
            case AcquireWorkers():
                self._acquired = action
                if action.pause_s:
                    self.deadlines.set(Deadline.PAUSE, time.monotonic() + action.pause_s)
                else:
                    self._place()
            case Launch(attempt=attempt):
                conclusion = launch(self, attempt)
                if conclusion is not None:
                    self._end_as(conclusion)
            case SendRoster() | Leave():
                self.group.call(action)
            case DrainAttempt():
                self._announce_drain()
                self.group.call(action)
            case Kill():
                # Earlier output may hold the cause; later output is only about lost peers.
                self.output.flush()
                self.output.muted = True
                if not self.survivors.ask(self.state, number=self.checkpoints.unused_number):
                    self.group.call(action)
            case EndAttempt():
                end(self, action)
            case Conclude():
                if action.succeeded and action.stopped is None:
                    self.publisher.attempt_ended(succeeded=True, planned=True, reason=action.reason)
                self._conclusion = action
            case _:
                assert_never(action)

    def _place(self) -> None:
        # Nodes may have been announced to leave during a pause.
        leaving = dict.fromkeys(self.state.leaving_nodes, math.inf)
        self.group.place(avoid={**self._acquired.avoid, **leaving}, without=self._acquired.without)

    def _announce_drain(self) -> None:
        drain = self.state.drain
        stopped = None if drain is None else drain.stopped
        if stopped is not None:
            after = ", and can be resumed" if not stopped.is_final else ""
            again = " A second signal ends it at once." if stopped.by == "signal" else ""
            logger.warning(
                "The run is %s. It ends after its next checkpoint%s.%s", stopped, after, again
            )

    def _take_report(self, report: Reported) -> None:
        noted = note(self.state, report)
        if noted is not None:
            self.state = noted
            self.publisher.reported(report)
            if self.background_tasks.at_once:
                # An inline run trains in this thread: no deadline is found before it has ended.
                self._look_at_budget()

    def _look_who_hangs(self) -> None:
        """End the attempt if its ranks don't join, or hang."""
        failure = self.health_monitor.look(self.state)
        if failure is not None:
            self.happen(Failed(attempt=self.state.attempt, failure=failure))
        held_back, self._held_back = self._held_back, []
        for event in held_back:
            self._handle(event)

    def _fail_if(self, failed: Failed | None) -> None:
        if failed is not None:
            self.happen(failed)

    def host_of(self, rank: int | None) -> str:
        """Return the address of a rank's node; empty if that isn't known."""
        members = self.group.members
        return members[rank].host if rank is not None and rank < len(members) else ""


def _ends(transition: Transition) -> bool:
    """Return whether an attempt or the run ends with a transition."""
    return any(isinstance(action, EndAttempt | Conclude) for action in transition.actions)
