"""Starts the attempts of a run, and records and publishes their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.manifest import AttemptId
from polytrain.errors import FailureKind, RunOwnedError
from polytrain.events.driver import LeaseLost, WorkEnded
from polytrain.policy.divergence import WINDOW
from polytrain.policy.failure import ENDS_BY
from polytrain.record.entries import AttemptEnded, Launched
from polytrain.run.checkpoint_coordinator import lease_lost
from polytrain.run.config_changes import OnRollbackError
from polytrain.run.states import Conclude, Concluded, EndAttempt
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import Attempt

if TYPE_CHECKING:
    from polytrain.run.controller import Controller


def launch(run: Controller, attempt: int) -> Conclude | None:
    """Start an attempt's processes, from the newest checkpoint.

    Returns:
        How the run ends if none can be started; None if they are.
    """
    changes = None
    try:
        if run.config_changes is not None:
            changes = run.config_changes.after(run.journal.history.divergences.rollbacks)
    except OnRollbackError as error:
        return Conclude(succeeded=False, reason=str(error), failures=(error.failure,))
    world_size = run.state.world_size
    # A pending commit may be the checkpoint to resume from.
    run.settle()
    try:
        start = run.checkpoints.next_start(attempt)
    except RunOwnedError as lost:
        return without_lease(lost, attempt)
    # Retention may have deleted the checkpoint of the progress after a state that was left.
    progress = max(run.state.progress, run.checkpoints.manager.progress)
    # After a divergence, the start is an older one.
    progress = min(start.step, progress)
    run.state = replace(
        run.state,
        committed=start.step,
        start=start.step,
        progress=progress,
        rescued=start.step - progress,
    )
    members = run.group.members
    run.journal.write(
        Launched(
            attempt=attempt,
            step=start.step,
            start=start.path,
            world_size=world_size,
            hosts=[member.host for member in members],
            gpus=[member.gpus for member in members],
            virtual_workers=run.virtual_workers,
        )
    )
    run.checkpoints.launched(attempt, world_size)
    run.survivors.launched(attempt, world_size)
    run.health_monitor.launched(attempt, world_size=world_size)
    run.output.begin_attempt()
    run.publisher.attempt_started(
        Attempt(
            number=attempt,
            checkpoint=start.path,
            num_workers=world_size,
            first_step=start.step + 1,
        )
    )
    run.group.launch(
        LaunchOrder(
            attempt_id=AttemptId(token=run.lease.token, attempt=attempt),
            members=members,
            start=start,
            first_checkpoint=run.checkpoints.manager.next_number,
            last_reports=last_reports(run),
            is_repeat=any(each.has_reported for each in run.state.attempts),
            changes=changes,
        )
    )
    # What came between two attempts ends this one.
    if run.lease.lost is not None:
        run.mailbox.put((LeaseLost(),))
    attached = run.validation_results.attached
    if attached is not None and attached.failure is not None:
        run.mailbox.put((WorkEnded(),))
    return None


def last_reports(run: Controller) -> Sequence[Mapping[str, Any]]:
    """Return rank 0's last reports; none if divergence isn't found by them."""
    rule = run.divergence_rule
    compares = rule is not None and rule.reads_history
    return run.journal.history.reports[-WINDOW:] if compares else ()


def without_lease(lost: RunOwnedError, attempt: int) -> Conclude:
    """Return how a run ends whose driver has lost its lease."""
    failure = lease_lost(lost, attempt=attempt).failure
    return Conclude(succeeded=False, reason=ENDS_BY[failure.kind], failures=(failure,))


def end(run: Controller, action: EndAttempt) -> None:
    """Record and publish the end of an attempt that isn't finished."""
    root, reason, drain = action.root, action.reason, run.state.drain
    is_last = isinstance(run.state.phase, Concluded)
    if not is_last and root is not None:
        starts_anew = run.checkpoints.manager.nothing_good
        reason = "; ".join(filter(None, (reason, starts_anew)))
    located = root and replace(
        root, host=run.host_of(root.rank), last_lines=run.output.last_lines(root)
    )
    run.journal.write(
        AttemptEnded(
            attempt=action.attempt, failure=located, reason=reason, failures=action.failures
        )
    )
    for failure in action.failures:
        run.output.log_traceback(failure)
    # A commit may have succeeded unnoticed by this driver.
    if any(attempt.root.kind is FailureKind.STORAGE for attempt in run.state.attempts[-1:]):
        run.checkpoints.manager.distrust()
    run.publisher.attempt_ended(
        succeeded=False,
        planned=root is None,
        reason=reason if root is None else f"{root} ({reason})",
        failures=action.failures,
        stopped=drain.stopped if is_last and drain is not None else None,
    )
