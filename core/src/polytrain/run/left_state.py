"""Commits the state that an attempt has left: what a survivor has written, or the ranks' copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.parts import StateWritten
from polytrain.events.attempt import AgentLost, ConditionMet, Exited, Reported
from polytrain.events.driver import DriverEvent
from polytrain.events.output import Output
from polytrain.run.attempts import last_reports
from polytrain.run.deadlines import Deadline
from polytrain.run.states import Training
from polytrain.workers.agents.calls import AgentEvent, Kill, SurvivorEvent
from polytrain_plugins import Stopped

if TYPE_CHECKING:
    from polytrain.run.controller import Controller

_OF_WORKER_0 = "rank 0 hasn't reported the step, and no other rank has virtual worker 0's metrics"

_STATE_WITHIN_S = 5.0
"""Seconds that a second signal waits at most for the processes' end, and for their state."""

_WITHOUT_SURVIVORS_S = 2.0
"""Of these, seconds for the ranks' copies, if no survivor has written its state before."""


def commit_state(run: Controller, written: StateWritten) -> None:
    """Commit the state that a survivor has written, once all that was reported is stored."""
    run.settle()
    reported = run.journal.history.reports.last_step
    refusal = run.checkpoints.refusal(written, reported=reported)
    if refusal:
        are_steps_lost = written.part.step > run.state.committed
        run.survivors.refused(refusal, are_steps_lost=are_steps_lost)
        return
    part = written.part
    newer = [each for each in written.reports if each[0] > reported]
    if written.reports and len(newer) == len(written.reports):
        lost = f"rank 0's reports after step {reported} are lost, and were too many"
        run.survivors.refused(lost)
        return
    if newer or part.step == reported + 1:
        newer.append((part.step, part.metrics))
    # Rank 0 was lost between these steps and its reports of them, which nobody repeats.
    for step, metrics in newer:
        stopped, wrong = _judged(run, written, step, metrics)
        if wrong:
            # Rank 0 repeats the step, and finds out itself.
            run.survivors.refused(wrong)
            return
        # It comes before the commit: if this driver is killed in between, the step is repeated.
        _report_for_rank_0(run, written, step, metrics, stopped)
    directory = run.checkpoints.commit_state(written)
    run.settle()
    if run.checkpoints.manager.committed_as(directory) is None:
        run.survivors.refused(f"the state that rank {written.rank} wrote wasn't committed")
    else:
        # It is newer than the attempt's start, also if no rank has reported.
        run.state = replace(run.state, has_reported=True)
        run.survivors.committed(written)


def keep_state(run: Controller) -> None:
    """Commit the newest state that the ranks have, before a signal ends the run at once.

    Copies lie complete on the nodes, and would be deleted there. Nothing more is written to a
    storage that doesn't answer.
    """
    survivors = run.survivors
    if not survivors.know_states or not isinstance(run.state.phase, Training):
        return
    until = time.monotonic() + _STATE_WITHIN_S
    if not run.background_tasks.finish(within_s=_STATE_WITHIN_S):
        return
    run.take_results()
    left = set(range(run.state.world_size))

    def take(event: AgentEvent | DriverEvent) -> None:
        if isinstance(event, Exited | AgentLost):
            left.discard(event.rank)
            survivors.gone(event.rank)
            if isinstance(event, AgentLost):
                survivors.copies_lost(event.rank)
                survivors.lost(event.rank)
        elif isinstance(event, SurvivorEvent | Reported | Output):
            # What else comes changes nothing any more.
            run.take(event)

    def wait_while(is_busy: Callable[[], object]) -> None:
        while is_busy() and time.monotonic() < until and not run.interrupts.are_urgent:
            deadline = run.deadlines.at(Deadline.SURVIVORS) or until
            run.group.wait(take, max(0.0, min(deadline, until) - time.monotonic()))
            if Deadline.SURVIVORS in run.deadlines.passed(time.monotonic()):
                survivors.overdue()

    number = run.checkpoints.unused_number
    if not survivors.ask_at_stop(number=number, latest=until - _WITHOUT_SURVIVORS_S):
        run.group.call(Kill(attempt=run.state.attempt))
    wait_while(lambda: left)
    if not left and survivors.store_copies(run.state, number=number):
        wait_while(lambda: survivors.copies.are_stored)
    if not left:
        run.commit_left_state()


def _judged(
    run: Controller, written: StateWritten, step: int, metrics: Mapping[str, Any]
) -> tuple[Stopped | None, str]:
    """Judge what a survivor reports by the rules that rank 0 applies to its own reports.

    A user's function isn't called here: it may be what rank 0 was lost in.

    Returns:
        How it ends the run; None if it doesn't. Why it can't stand for rank 0's, else empty.
    """
    rule = run.divergence_rule
    if run.virtual_workers is not None and written.rank != 0:
        return None, _OF_WORKER_0
    if run.stop_rule.function is not None or (rule is not None and rule.function is not None):
        return None, "rank 0 asks a function of yours about each report, and was lost before"
    wrong = rule and rule.wrong(metrics, last_reports(run))
    if wrong:
        return None, f"it diverges: {wrong}"
    stopped = run.stop_rule.limit_met_by(step, metrics)
    if stopped is not None and step < written.part.step:
        return None, f"it was made after step {step}, at which a condition is met"
    return stopped, ""


def _report_for_rank_0(
    run: Controller,
    written: StateWritten,
    step: int,
    metrics: Mapping[str, Any],
    stopped: Stopped | None,
) -> None:
    """Publish a report that rank 0 didn't make; `stopped` is how it ends the run, if it does."""
    report = Reported(
        attempt=written.attempt,
        rank=0,
        step=step,
        metrics=metrics,
        at=run.journal.clock.now(),
        # A run's only worker leaves a state of its own.
        survivor=written.rank or None,
    )
    run.publisher.reported(report)
    if stopped is not None:
        run.happen(ConditionMet(attempt=written.attempt, rank=0, stopped=stopped))
