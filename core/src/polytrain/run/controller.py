"""The controller: passes events to the state machine, and carries out its actions."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, assert_never

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import CheckpointEvent, CheckpointsAsked
from polytrain.errors import Failure, FailureKind, RunOwnedError
from polytrain.events.attempt import (
    AgentLost,
    Diverged,
    Done,
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
from polytrain.events.output import BarMoved, Output
from polytrain.functions.return_values import Returned
from polytrain.output.worker_output import WorkerOutput
from polytrain.policy.divergence import WINDOW, DivergenceRule
from polytrain.policy.stop_rule import StopRule
from polytrain.policy.validation import Validation
from polytrain.record.entries import (
    AttemptEnded,
    CodeContent,
    CommitFound,
    Launched,
    RunConcluded,
    StopConditionMet,
)
from polytrain.record.journal import Journal
from polytrain.run.attached_work import AttachedWork
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.checkpoint_coordinator import (
    CheckpointCoordinator,
    lease_lost,
)
from polytrain.run.config_changes import ConfigChanges, OnRollbackError
from polytrain.run.health_monitor import HealthMonitor
from polytrain.run.interrupts import Interrupts
from polytrain.run.lease import Lease
from polytrain.run.left_state import commit_state
from polytrain.run.machine import begin, note, step
from polytrain.run.program import commit_search
from polytrain.run.publisher import Publisher
from polytrain.run.requests import RemoteRequests, StacksRequests, StopRequests
from polytrain.run.states import (
    AcquireWorkers,
    Action,
    Conclude,
    Concluded,
    EndAttempt,
    Gathering,
    Launch,
    State,
    Training,
    Transition,
    entries_of,
)
from polytrain.run.survivors import Survivors
from polytrain.text.described import numbered
from polytrain.workers.agents.calls import (
    AgentEvent,
    DrainAttempt,
    Kill,
    Leave,
    ReadStacks,
    SendCheckpoints,
    SendRoster,
    SurvivorEvent,
)
from polytrain.workers.driver.group import WorkerGroup
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import Attempt

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
    stop_requests: StopRequests
    remote_requests: RemoteRequests
    survivors: Survivors
    attached: AttachedWork | None = None
    asks_git_at_once: bool = False
    """Whether the run waits for git before its first worker; see `commit_search`."""

    stop_rule: StopRule = field(default_factory=StopRule)
    config_changes: ConfigChanges | None = None
    """What `on_rollback` changes for later attempts; None without it."""

    virtual_workers: int | None = None
    code_after: Callable[[], CodeContent | None] = lambda: None
    """Returns `RunConcluded.code` once training has ended."""

    divergence_rule: DivergenceRule | None = None
    """What counts as divergence, which the ranks find; None if nothing does."""

    release_workers: Callable[[], None] = lambda: None
    """Releases the workers' resources, before the run itself has ended."""

    interrupts: Interrupts = field(default_factory=Interrupts)
    """Lets signals interrupt only code that waits."""

    _commit: Future[CommitFound | None] | None = None
    """Git's answer; None once it is noted."""

    _conclusion: Conclude | None = None
    _unanswered: list[CheckpointsAsked] = field(default_factory=list)
    """Requests for checkpoints in this attempt that wait for validations."""

    _returned: dict[int, Returned] = field(default_factory=dict)
    """Return values of this attempt's training functions, by rank."""

    _last_gone: Exited | AgentLost | None = None
    """The end of the attempt's last process, which waits until copies of the state are stored."""

    _stacks_requests: StacksRequests = field(default_factory=StacksRequests)
    _held_back: list[Event] = field(default_factory=list)
    """Events deferred while stacks are dumped: the reason for the dump is handled first."""

    def conclude(self) -> Conclude:
        """Run to the end, and return the conclusion."""
        self.lease.notify(self._wake)
        self.stop_requests.notify(self._wake)
        self.remote_requests.notify(self._wake)
        self._commit = commit_search(self._wake, at_once=self.asks_git_at_once)
        self._follow(None, begin(self.state))
        # A stop requested before the run began starts no worker.
        self._take_stop_requests()
        while self._conclusion is None:
            with self.interrupts.allowed():
                self.group.wait(self.take, self._wait_limit())
            self.take_results()
            self._fail_if(self.checkpoints.overdue())
            self.survivors.overdue()
            self._take_last_gone()
            self._look_who_hangs()
            self._answer_who_wants_stacks()
        self.checkpoints.all_are_good()
        conclusion = self._validated(self._conclusion)
        self._finish_tasks()
        if conclusion.succeeded and conclusion.stopped is None:
            self.journal.returned(self.returned)
        self._note_commit(wait_s=_GIT_WITHIN_S)
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

    def _validated(self, conclusion: Conclude) -> Conclude:
        """Wait for pending validations. A run that was stopped leaves them to its next driver."""
        attached = self.attached
        if not conclusion.succeeded or attached is None:
            return conclusion
        drain = self.state.drain
        stopped = None if drain is None else drain.stopped
        if attached.is_busy:
            if stopped is not None and not stopped.is_final:
                return Conclude(succeeded=False, stopped=stopped, reason=str(stopped))
            logger.info(
                "Training has ended; %s left.", numbered(attached.pending, "validation", "are")
            )
            # They may wait for the workers' resources.
            self.release_workers()
        while attached.is_busy and attached.failure is None:
            if self.lease.lost is not None:
                return self._without_lease(self.lease.lost)
            stopped = self.stop_requests.take()
            if stopped is not None:
                return Conclude(succeeded=False, stopped=stopped, reason=str(stopped))
            self._take_validations(wait=True)
        if attached.failure is not None:
            reason = "ValidationConfig(on_failure='fail') ends the run"
            failures = (attached.failure,)
            return Conclude(succeeded=False, reason=reason, failures=failures)
        attached.warn_if_unused()
        return replace(conclusion, validation_failure=attached.all_failed)

    def _without_lease(self, lost: RunOwnedError) -> Conclude:
        failure = lease_lost(lost, attempt=self.state.attempt).failure
        reason = "this driver has lost its lease on the run"
        return Conclude(succeeded=False, reason=reason, failures=(failure,))

    def _take_validations(self, *, wait: bool = False) -> None:
        taken: Sequence[Validation] = ()
        if self.attached is not None:
            with self.interrupts.allowed() if wait else contextlib.nullcontext():
                taken = self.attached.take(wait=wait)
        for ended in taken:
            self.checkpoints.validated(ended)
            stopped = self.stop_rule.limit_met_by(ended.step, ended.metrics)
            if stopped is not None and not isinstance(self.state.phase, Concluded):
                # This driver may die before it concludes the run.
                self.journal.write(StopConditionMet(attempt=self.state.attempt, stopped=stopped))
                self.happen(stop_wanted(stopped))
        if self._unanswered:
            self._answer()

    def _answer(self) -> None:
        """Answer requests for checkpoints, unless they wait for pending validations."""
        questions, self._unanswered = self._unanswered, []
        for asked in questions:
            if asked.validated and self.attached is not None and self.attached.is_busy:
                self._unanswered.append(asked)
            else:
                found = self.checkpoints.manager.reported()
                answer = SendCheckpoints(
                    attempt=asked.attempt, number=asked.number, checkpoints=found
                )
                self.group.call(answer, (asked.rank,))

    def _take_question(self, asked: CheckpointsAsked) -> None:
        if asked.attempt != self.state.attempt:
            return
        self._unanswered.append(asked)
        self._answer()
        # An inline run's training function waits in this thread.
        while self._unanswered and self.background_tasks.at_once:
            self._take_validations(wait=True)

    def _wake(self) -> None:
        self.group.wake()
        if self.attached is not None:
            self.attached.nudge()

    def _finish_tasks(self) -> None:
        with self.interrupts.allowed():
            self.background_tasks.finish()

    def settle(self) -> None:
        """Wait for the background tasks, and handle their results."""
        self._finish_tasks()
        self.take_results()

    def take(self, event: AgentEvent) -> None:
        """Handle an event of a rank's agent; signals wait meanwhile."""
        with self.interrupts.deferred():
            self._handle(event)

    def _handle(self, event: AgentEvent) -> None:
        if isinstance(event, Output):
            self.output.write(event)
            return
        if isinstance(event, BarMoved):
            if event.attempt == self.state.attempt:
                self.output.show_bars(event)
            return
        if isinstance(event, HealthEvent):
            if isinstance(event, Stacks):
                self._stacks_requests.take(event)
            wanted = self.health_monitor.take(event)
            if wanted is not None:
                self.happen(wanted)
            return
        if isinstance(event, CheckpointEvent | Reported):
            if isinstance(event, Reported):
                self._take_report(event)
            else:
                self._take_checkpoint_event(event)
            self._take_results_of_inline_run()
            return
        if isinstance(event, SurvivorEvent):
            self.survivors.take(event)
            return
        if isinstance(event, StateDigested):
            if event.attempt == self.state.attempt:
                self.publisher.digested(event)
            return
        if isinstance(event, ExactnessFound):
            if event.attempt == self.state.attempt:
                self.publisher.checked_exactness(event)
            return
        if isinstance(event, CheckpointsAsked):
            self._take_question(event)
            return
        if self.health_monitor.may_have_caused(event):
            self._held_back.append(event)
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
            self._take_returned(event)
            self._fail_if(self.checkpoints.done(event.rank))
        self.happen(event)
        if isinstance(event, AgentLost):
            self.survivors.lost(event.rank)
        self._take_results_of_inline_run()

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

    @property
    def last_reports(self) -> Sequence[Mapping[str, Any]]:
        """Rank 0's last reports; none if divergence isn't found by them."""
        rule = self.divergence_rule
        compares = rule is not None and rule.reads_history
        return self.journal.history.reports[-WINDOW:] if compares else ()

    @property
    def returned(self) -> tuple[Returned | None, ...]:
        """Return value of each rank's training function; empty if none returned anything."""
        if not self._returned:
            return ()
        return tuple(self._returned.get(rank) for rank in range(self.state.world_size))

    def _take_returned(self, done: Done) -> None:
        if done.returned is None or done.attempt != self.state.attempt:
            return
        self._returned[done.rank] = done.returned
        if done.returned.kind == "lost":
            logger.warning("What rank %d has returned isn't kept: %s", done.rank, done.returned.why)

    def _take_results_of_inline_run(self) -> None:
        """Take the results of an event. Those of other runs are taken after all events."""
        if self.background_tasks.at_once:
            self.take_results()

    def take_results(self) -> None:
        """Handle what background tasks, validations and requests have brought."""
        for event in self.background_tasks.results():
            if isinstance(event, CheckpointEvent):
                self._take_checkpoint_event(event)
            else:
                self.happen(event)
        self._take_validations()
        self._note_commit()
        if self.lease.lost is not None and isinstance(self.state.phase, Gathering | Training):
            self.happen(lease_lost(self.lease.lost, attempt=self.state.attempt))
        failure = None if self.attached is None else self.attached.failure
        if failure is not None and isinstance(self.state.phase, Gathering | Training):
            self.happen(Failed(attempt=self.state.attempt, failure=failure))
        self._take_stop_requests()
        self._look_at_budget()

    def _note_commit(self, *, wait_s: float = 0.0) -> None:
        """Note the commit of the driver's code, once git has answered."""
        if self._commit is None:
            return
        wait([self._commit], wait_s)
        if self._commit.done():
            found, self._commit = self._commit.result(), None
            if found is not None:
                self.journal.write(found)

    def _take_stop_requests(self) -> None:
        while (stopped := self.stop_requests.take()) is not None:
            self.happen(stop_wanted(stopped))

    def _look_at_budget(self) -> None:
        """Stop the run if its time is over."""
        if self.stop_rule.time_budget_s is None or not isinstance(self.state.phase, Training):
            return
        if self.state.drain is None or self.state.drain.stopped is None:
            trained_s = self.journal.history.ledger.trained_s(self.journal.clock.now())
            stopped = self.stop_rule.budget_met_by(trained_s, step=self.state.steps.get(0, 0))
            if stopped is not None:
                self.happen(stop_wanted(stopped))

    @property
    def _budget_deadline(self) -> float | None:
        """Monotonic time at which the time budget may be spent."""
        budget_s, ledger = self.stop_rule.time_budget_s, self.journal.history.ledger
        if budget_s is None or not isinstance(self.state.phase, Training) or self.state.drain:
            return None
        return time.monotonic() + budget_s - ledger.trained_s(self.journal.clock.now())

    def _take_checkpoint_event(self, event: CheckpointEvent) -> None:
        noted = note(self.state, event)
        if noted is not None:
            self.state = noted
            self._fail_if(self.checkpoints.take(event, good_step=self.state.good_step))

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
        # Set the state before the actions: in an inline run an action may cause the next event.
        self.state = transition.state
        for action in transition.actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case AcquireWorkers(avoid=avoid, without=without):
                self.group.place(avoid=avoid, without=without)
            case Launch(attempt=attempt):
                self._launch(attempt)
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
            case EndAttempt(root=root, reason=reason):
                if not isinstance(self.state.phase, Concluded) and root is not None:
                    starts_anew = self.checkpoints.manager.nothing_good
                    reason = "; ".join(filter(None, (reason, starts_anew)))
                self.journal.write(
                    AttemptEnded(
                        attempt=action.attempt,
                        failure=root and self._located(root),
                        reason=reason,
                        failures=action.failures,
                    )
                )
                for failure in action.failures:
                    self.output.log_traceback(failure)
                self._distrust_after_storage_failure()
                why = reason if root is None else f"{root} ({reason})"
                self.publisher.attempt_ended(
                    succeeded=False,
                    planned=root is None,
                    reason=why,
                    restarts=self.journal.history.ledger.restarts,
                    failures=action.failures,
                )
            case Conclude():
                if action.succeeded and action.stopped is None:
                    self.publisher.attempt_ended(
                        succeeded=True,
                        planned=True,
                        reason=action.reason,
                        restarts=self.journal.history.ledger.restarts,
                    )
                self._conclusion = action
            case _:
                assert_never(action)

    def _located(self, failure: Failure) -> Failure:
        """Return a failure with its rank's host, and the end of that rank's output."""
        rank = failure.rank
        return replace(
            failure, host=self.host_of(rank), last_lines=tuple(self.output.last_lines(rank))
        )

    def _fail(self, conclusion: Conclude) -> None:
        """Conclude in place of a launch."""
        self.state = replace(self.state, phase=Concluded(succeeded=False))
        self._conclusion = conclusion

    def _launch(self, attempt: int) -> None:
        changes = None
        try:
            if self.config_changes is not None:
                changes = self.config_changes.after(self.journal.history.divergences.rollbacks)
        except OnRollbackError as error:
            failures = (error.failure,)
            self._fail(Conclude(succeeded=False, reason=str(error), failures=failures))
            return
        world_size = self.state.world_size
        self._returned.clear()
        self._unanswered.clear()
        # A pending commit may be the checkpoint to resume from.
        self.settle()
        try:
            start = self.checkpoints.next_start(attempt)
        except RunOwnedError as lost:
            self._fail(self._without_lease(lost))
            return
        # Retention may have deleted the checkpoint of the progress after a state that was left.
        progress = max(self.state.progress, self.checkpoints.manager.progress)
        # After a divergence, the start is an older one.
        progress = min(start.step, progress)
        self.state = replace(
            self.state,
            committed=start.step,
            start=start.step,
            progress=progress,
            rescued=start.step - progress,
        )
        members = self.group.members
        self.journal.write(
            Launched(
                attempt=attempt,
                step=start.step,
                start=start.path,
                world_size=world_size,
                hosts=[member.host for member in members],
                gpus=[member.gpus for member in members],
                virtual_workers=self.virtual_workers,
            )
        )
        self.checkpoints.launched(attempt, world_size)
        self.survivors.launched(attempt, world_size)
        self.health_monitor.launched(attempt, world_size=self.state.world_size)
        self.output.begin_attempt()
        self.publisher.attempt_started(
            Attempt(
                number=attempt,
                checkpoint=start.path,
                num_workers=world_size,
                first_step=start.step + 1,
            )
        )
        self.group.launch(
            LaunchOrder(
                attempt_id=AttemptId(token=self.lease.token, attempt=attempt),
                members=self.group.members,
                start=start,
                first_checkpoint=self.checkpoints.manager.next_number,
                last_reports=self.last_reports,
                is_repeat=any(each.has_reported for each in self.state.attempts),
                changes=changes,
            )
        )

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

    def _distrust_after_storage_failure(self) -> None:
        """Distrust known checkpoints: a commit may have succeeded unnoticed by this driver."""
        last = self.state.attempts[-1:]
        if any(attempt.root.kind is FailureKind.STORAGE for attempt in last):
            self.checkpoints.manager.distrust()

    def _wait_limit(self) -> float | None:
        """Seconds until the next deadline."""
        deadlines = (
            self.checkpoints.deadline,
            self.survivors.deadline,
            self.health_monitor.deadline,
            self._stacks_requests.deadline,
            self._budget_deadline,
        )
        nearest = min((at for at in deadlines if at is not None), default=None)
        return None if nearest is None else max(0.0, nearest - time.monotonic())

    def _look_who_hangs(self) -> None:
        """End the attempt if its ranks don't join, or hang."""
        failure = self.health_monitor.look(self.state)
        if failure is not None:
            self.happen(Failed(attempt=self.state.attempt, failure=failure))
        held_back, self._held_back = self._held_back, []
        for event in held_back:
            self._handle(event)

    def _answer_who_wants_stacks(self) -> None:
        attempt, world_size, now = self.state.attempt, self.state.world_size, time.monotonic()
        for request in self.remote_requests.stacks_wanted():
            if self._stacks_requests.add(request, attempt=attempt, world_size=world_size, now=now):
                self.group.call(ReadStacks(attempt=attempt, pausing=False))
        for request, stacks in self._stacks_requests.answered(now=now):
            answer = partial(self.remote_requests.answer, request, {"stacks": stacks})
            self.background_tasks.submit(answer)

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
