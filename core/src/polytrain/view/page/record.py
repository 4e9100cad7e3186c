"""A run's history with what a restart has undone, and when everything happened. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polytrain.record.history import RunHistory
from polytrain.record.reports import Reports
from polytrain.record.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Happening:
    """A line of the journal, and when it was written."""

    at: float
    """Seconds of the run's own time before it."""

    entry: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Undone:
    """Reports that came after the checkpoint from which an attempt resumed."""

    launch: int
    """Number of launches before that attempt."""

    reports: Reports


@dataclass
class RunRecord(RunHistory):
    """`read_as(RunRecord, journal)`: all that a page shows of a run's journal."""

    ledger: Timeline = field(default_factory=Timeline)
    happenings: list[Happening] = field(default_factory=list)
    """Every line but reports."""

    undone: list[Undone] = field(default_factory=list)

    def take(self, entry: Mapping[str, Any]) -> None:
        if entry["event"] == "Launched":
            lost = self.history.after(entry["step"])
            if lost:
                self.undone.append(Undone(self.launches, lost))
        super().take(entry)
        self.happenings.append(Happening(self.ledger.wall_s, entry))
