"""What has become of a run, in a few words and in one sentence. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from polytrain.text.described import numbered, shortened
from polytrain.view.page.facts import Facts
from polytrain.view.run_state import RunState

_LONGEST = 300
"""Characters of a failure in the sentence."""


def verdict(facts: Facts) -> str:
    """Return what has become of a run, what it took and what went wrong."""
    parts = [_end(facts)]
    if facts.restarts:
        parts.append(numbered(facts.restarts, "restart"))
    if facts.lost_steps:
        parts.append(f"{numbered(facts.lost_steps, 'step')} done again")
    parts.append(f"{100 * facts.goodput:.0f} % goodput")
    sentence = f"{', '.join(parts)}."
    if facts.validation_failure:
        why = shortened(facts.validation_failure.rstrip("."), _LONGEST)
        sentence += f" No checkpoint has a score: {why}."
    failures = facts.failures
    if failures and failures[-1].failure is not None:
        which = "It failed" if facts.source.state is RunState.FAILED else "The last failure"
        what = " ".join(failures[-1].failure.sentence.split()).rstrip(".")
        sentence += f" {which}: {shortened(what, _LONGEST)}."
    return sentence


def _end(facts: Facts) -> str:
    end = run_end(
        facts.source.state,
        seconds=facts.wall_s,
        reason=facts.reason,
        was_stopped=facts.was_stopped,
        driver=facts.source.driver,
    )
    if facts.source.state is RunState.RUNNING:
        end += f" (read at {datetime.fromtimestamp(facts.source.read, UTC):%Y-%m-%d %H:%M:%S} UTC)"
    return f"{end[0].upper()}{end[1:]}"


def run_end(
    state: RunState, *, seconds: float, reason: str, was_stopped: bool, driver: str | None
) -> str:
    """Return what has become of a run, without a capital letter or a full stop.

    Args:
        seconds: the run's own time, over all its drivers.
        reason: of its conclusion; empty if there is none.
        was_stopped: whether somebody, or a stop condition, ended it early.
        driver: who holds its lease, or held it last.
    """
    took = duration(seconds)
    why = f" ({reason})" if reason else ""
    match state:
        case RunState.RUNNING:
            return f"still running after {took}"
        case RunState.INTERRUPTED:
            who = f"its driver ({driver})" if driver else "its driver"
            return f"interrupted after {took}: {who} died, and fit() resumes it"
        case RunState.STOPPED:
            return f"stopped after {took}{why}: fit() resumes it"
        case RunState.FAILED:
            return f"failed after {took}{why}"
        case RunState.FINISHED:
            return f"finished in {took}{why if was_stopped else ''}"


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
