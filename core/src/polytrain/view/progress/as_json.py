"""A run's progress as JSON Lines, for programs. Pure."""

from __future__ import annotations

from typing import Any

from polytrain.errors import Failure
from polytrain.record.entries import (
    AttemptEnded,
    CheckpointCommitted,
    DrainRequested,
    Entry,
    Launched,
    StragglerFound,
    ValidationEnded,
)
from polytrain.record.progress import Progress
from polytrain.text import strict_json
from polytrain.view.progress.text import command
from polytrain_plugins import RunInfo

SCHEMA_VERSION = 1
"""Of all lines; a change that breaks their readers raises it."""


def started_line(run: RunInfo, *, now: float) -> str:
    """Return the first line of a run."""
    return _line(
        run,
        "run_started",
        now,
        backend=run.backend,
        workers=run.num_workers,
        path=run.path,
        cluster=run.cluster,
    )


def progress_line(run: RunInfo, progress: Progress, *, now: float) -> str:
    """Return what a run is doing."""
    return _line(
        run,
        "progress",
        now,
        stage=progress.stage.name.lower(),
        step=progress.step,
        total_steps=progress.total,
        repeats_until=progress.repeats_until,
        steps_per_s=progress.steps_per_s,
        left_s=progress.left_s(now),
        metrics=dict(progress.metrics),
        committed_step=progress.committed,
        workers=progress.world_size,
        busy=list(progress.busy),
        restarts=progress.restarts,
        goodput=progress.ledger.goodput,
    )


def event_line(run: RunInfo, entry: Entry) -> str | None:
    """Return the line that a line of the journal is worth; None if it is worth none."""
    match entry:
        case Launched():
            fields = {
                "attempt": entry.attempt,
                "workers": entry.world_size,
                "checkpoint": entry.start,
                "first_step": entry.step + 1,
            }
            return _line(run, "attempt_started", entry.time, **fields)
        case AttemptEnded():
            return _line(
                run,
                "attempt_ended",
                entry.time,
                attempt=entry.attempt,
                reason=entry.reason,
                failure=None if entry.failure is None else _failure(run, entry.failure),
            )
        case CheckpointCommitted():
            fields = {"step": entry.step, "checkpoint": entry.checkpoint}
            return _line(run, "checkpoint_committed", entry.time, **fields)
        case ValidationEnded():
            names = ("checkpoint", "step", "status", "metrics", "reason")
            fields = {name: getattr(entry, name) for name in names}
            return _line(run, "checkpoint_validated", entry.time, **fields)
        case StragglerFound():
            fields = {name: getattr(entry, name) for name in ("attempt", "rank", "host", "reason")}
            return _line(run, "straggler", entry.time, **fields)
        case DrainRequested():
            return _line(run, "stopping", entry.time, reason=entry.reason)
        case _:
            return None


def ended_line(run: RunInfo, progress: Progress, *, now: float) -> str:
    """Return the last line of a run."""
    concluded = progress.concluded
    if concluded is None:
        state, reason = "interrupted", ""
    elif concluded.succeeded:
        state, reason = "finished", concluded.reason
    else:
        state = "stopped" if concluded.stopped else "failed"
        reason = concluded.reason
    return _line(
        run,
        "run_ended",
        now,
        state=state,
        reason=reason,
        validation_failure="" if concluded is None else concluded.validation_failure,
        restarts=progress.restarts,
        step=progress.step,
        metrics=dict(progress.metrics),
        committed_step=progress.committed,
        seconds=dict(progress.ledger.seconds),
        goodput=progress.ledger.goodput,
    )


def _failure(run: RunInfo, failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind.value,
        "rank": failure.rank,
        "host": failure.host,
        "step": failure.step,
        "message": failure.message,
        "last_lines": list(failure.last_lines),
        "command": command(run, failure),
    }


def _line(run: RunInfo, event: str, now: float, **fields: Any) -> str:
    head = {"schema_version": SCHEMA_VERSION, "event": event, "time": now, "run": run.name}
    return strict_json.dumps({**head, **fields})
