"""Applies the results of validations: to checkpoints, to the run, and to ranks that wait for them.

When training has ended, the run waits for the last of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from polytrain.checkpoint.parts import CheckpointsAsked
from polytrain.errors import FailureKind
from polytrain.events.attempt import DrainWanted, stop_wanted
from polytrain.events.driver import DriverEvent, WorkEnded
from polytrain.events.output import Output
from polytrain.policy.failure import ENDS_BY
from polytrain.record.entries import StopConditionMet
from polytrain.run.attached_work import AttachedWork
from polytrain.run.attempts import without_lease
from polytrain.run.states import Conclude, Concluded
from polytrain.text.described import numbered
from polytrain.workers.agents.agent_host import PoolEvent
from polytrain.workers.agents.calls import AgentEvent, SendCheckpoints
from polytrain.workers.driver.group import arrived
from polytrain_plugins import Stopped

if TYPE_CHECKING:
    from polytrain.run.controller import Controller

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ValidationResults:
    """What this driver does with the results of its validations."""

    attached: AttachedWork | None = None
    release_workers: Callable[[], None] = lambda: None
    """Releases the workers' resources, before the run itself has ended."""

    stopped: Stopped | None = None
    """The request to stop that came when training had ended."""

    _unanswered: list[CheckpointsAsked] = field(default_factory=list)
    """Requests for checkpoints that wait for validations."""

    def take(self, run: Controller) -> None:
        """Apply the results that there are now, and start the next validation."""
        if self.attached is None:
            return
        for ended in self.attached.take():
            run.checkpoints.validated(ended)
            stopped = run.stop_rule.limit_met_by(ended.step, ended.metrics)
            if stopped is not None and not isinstance(run.state.phase, Concluded):
                # This driver may die before it concludes the run.
                run.journal.write(StopConditionMet(attempt=run.state.attempt, stopped=stopped))
                run.happen(stop_wanted(stopped))
        self._answer(run)

    def asked(self, run: Controller, asked: CheckpointsAsked) -> None:
        """Answer a rank that wants the run's checkpoints, now or after pending validations."""
        self._unanswered.append(asked)
        self._answer(run)
        later = []
        # An inline run's training function waits in this thread.
        while self._unanswered and run.background_tasks.at_once:
            for event in _arrived(run):
                if isinstance(event, Output | WorkEnded):
                    run.take(event)
                else:
                    later.append(event)
        if later:
            run.mailbox.put(later)

    def _answer(self, run: Controller) -> None:
        questions, self._unanswered = self._unanswered, []
        for asked in questions:
            if asked.attempt != run.state.attempt:
                continue
            if asked.validated and self.attached is not None and self.attached.is_busy:
                self._unanswered.append(asked)
            else:
                found = run.checkpoints.manager.reported()
                answer = SendCheckpoints(
                    attempt=asked.attempt, number=asked.number, checkpoints=found
                )
                run.group.call(answer, (asked.rank,))

    def concluded(self, run: Controller, conclusion: Conclude) -> Conclude:
        """Wait for pending validations. A run that was stopped leaves them to its next driver."""
        attached = self.attached
        if not conclusion.succeeded or attached is None:
            return conclusion
        drain = run.state.drain
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
            if run.lease.lost is not None:
                return without_lease(run.lease.lost, run.state.attempt)
            if self.stopped is not None:
                return Conclude(succeeded=False, stopped=self.stopped, reason=str(self.stopped))
            for event in _arrived(run):
                # What comes of workers changes nothing any more.
                if isinstance(event, Output | DriverEvent | DrainWanted):
                    run.take(event)
        if attached.failure is not None:
            reason = ENDS_BY[FailureKind.VALIDATION]
            return Conclude(succeeded=False, reason=reason, failures=(attached.failure,))
        attached.warn_if_unused()
        return replace(conclusion, validation_failure=attached.all_failed)


def _arrived(run: Controller) -> list[AgentEvent | DriverEvent | PoolEvent]:
    """Wait for mail, and return it."""
    with run.interrupts.allowed():
        return [*arrived(run.mailbox)]
