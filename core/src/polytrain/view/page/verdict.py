"""A run in one sentence. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from polytrain.record.state import RunState
from polytrain.text.first_few import numbered
from polytrain.view.page.facts import Facts
from polytrain.view.run_end import run_end

_LONGEST = 300
"""Characters of a failure in the sentence."""


def verdict(facts: Facts) -> str:
    """Return what has become of a run, what it took and what went wrong."""
    parts = [_end(facts)]
    if facts.restarts:
        times = "one restart" if facts.restarts == 1 else f"{facts.restarts} restarts"
        parts.append(times)
    if facts.lost_steps:
        steps = numbered(facts.lost_steps, "step")
        parts.append(f"{steps} done again")
    parts.append(f"{100 * facts.goodput:.0f} % goodput")
    sentence = f"{', '.join(parts)}."
    failures = facts.failures
    if failures and failures[-1].failure is not None:
        which = "It failed" if facts.source.state is RunState.FAILED else "The last failure"
        sentence += f" {which}: {_short(failures[-1].failure.sentence)}."
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


def _short(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
