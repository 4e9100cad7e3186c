"""Entries of a journal as tests write them: what a test doesn't say is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytrain.events.attempt import Event
from polytrain.record.entries import FORMAT, Entry, decoded
from polytrain.record.journal import Journal
from polytrain.run.states import Transition, entries_of

_FILLED: Mapping[str, Mapping[str, Any]] = {
    "Opened": {"format": FORMAT, "anew": True, "identity": {}, "world_size": 1},
    "Launched": {"attempt": 0, "step": 0, "start": None, "world_size": 1},
    "Joined": {"rank": 0, "phase": "Training", "attempt": 0},
    "DrainWanted": {"phase": "Training", "attempt": 0},
    "Reported": {"step": 0, "metrics": {}},
    "Committed": {"checkpoint": "checkpoint_000000-1.0", "step": 0},
    "AttemptEnded": {"attempt": 0, "failure": None, "reason": ""},
    "Started": {"attempt": 0},
    "StacksDumped": {"attempt": 0, "reason": "", "stacks": {}},
    "Concluded": {"succeeded": True, "stopped": None, "reason": ""},
}


def entry_of(line: Mapping[str, Any]) -> Entry:
    """Return the entry that a line holds, with what it leaves out."""
    filled = {"token": 1, **_FILLED.get(line["event"], {}), **line}
    return decoded(filled, file="journal", number=1)


def write_transition(journal: Journal, event: Event | None, transition: Transition) -> None:
    """Write what the journal has of a transition, as the controller does."""
    for entry in entries_of(event, transition):
        journal.write(entry)
