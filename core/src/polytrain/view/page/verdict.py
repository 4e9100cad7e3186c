"""A run in one sentence. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from polytrain.record.state import RunState
from polytrain.view.page.facts import Facts

_LONGEST = 300
"""Characters of a failure in the sentence."""


def verdict(facts: Facts) -> str:
    """Return what has become of a run, what it took and what went wrong."""
    parts = [_end(facts)]
    if facts.restarts:
        times = "one restart" if facts.restarts == 1 else f"{facts.restarts} restarts"
        parts.append(times)
    if facts.lost_steps:
        steps = "1 step" if facts.lost_steps == 1 else f"{facts.lost_steps} steps"
        parts.append(f"{steps} done again")
    parts.append(f"{100 * facts.goodput:.0f} % goodput")
    sentence = f"{', '.join(parts)}."
    failures = facts.failures
    if failures and failures[-1].failure is not None:
        which = "It failed" if facts.source.state is RunState.FAILED else "The last failure"
        sentence += f" {which}: {_short(failures[-1].failure.sentence)}."
    return sentence


def _end(facts: Facts) -> str:
    took = duration(facts.wall_s)
    match facts.source.state:
        case RunState.RUNNING:
            at = datetime.fromtimestamp(facts.source.read, UTC)
            return f"Still running at {at:%Y-%m-%d %H:%M:%S} UTC, after {took}"
        case RunState.INTERRUPTED:
            return f"Interrupted after {took}: its driver died, and fit() resumes it"
        case RunState.STOPPED:
            return f"Stopped after {took} ({facts.reason}): fit() resumes it"
        case RunState.FAILED:
            return f"Failed after {took}"
        case RunState.FINISHED:
            return f"Finished in {took}{f' ({facts.reason})' if facts.was_stopped else ''}"


def duration(seconds: float) -> str:
    """Return a length of time for people: "3.2 s", "4 min 5 s", "2 d 3 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def _short(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
