"""A run's history with what a restart has undone, and when everything happened. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytrain.record.entries import Entry, Launched, MetricsReported, ReportBlock
from polytrain.record.history import RunHistory
from polytrain.record.reports import Reports
from polytrain.record.timeline import Timeline


@dataclass(frozen=True, slots=True)
class TimedEntry:
    """An entry of the journal, and when it was written."""

    at: float
    """Seconds of the run's own time before it."""

    entry: Entry


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
    timed: list[TimedEntry] = field(default_factory=list)
    """Every entry but reports."""

    undone: list[Undone] = field(default_factory=list)

    def take(self, entry: Entry) -> None:
        is_current = entry.token >= self._token
        if isinstance(entry, Launched) and is_current:
            lost = self.reports.after(entry.step)
            if lost:
                self.undone.append(Undone(self.launches, lost))
        super().take(entry)
        if is_current and not isinstance(entry, MetricsReported | ReportBlock):
            self.timed.append(TimedEntry(self.ledger.wall_s, entry))
