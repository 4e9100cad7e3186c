"""A run as it is now: what its journal says, and who holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polytrain.record.entries import Entry, Launched, MetricsReported, ReportBlock
from polytrain.record.history import JOURNAL, RunHistory, entries, read_as
from polytrain.record.reports import Reports
from polytrain.record.run_facts import RunFacts
from polytrain.run.lease import Holder, holder
from polytrain.storage.location import Location
from polytrain.view.ranks import RankRecords
from polytrain.view.run_state import RunState, run_state
from polytrain.view.timeline import TimedEntry, Timeline


@dataclass
class RunRecord(RunHistory):
    """`read_as(RunRecord, journal)`: a run's history, with all else that is shown of a journal."""

    ledger: Timeline = field(default_factory=Timeline)
    facts: RunFacts = field(default_factory=RunFacts)
    """What it was started with."""

    ranks: RankRecords = field(default_factory=RankRecords)
    timed: list[TimedEntry] = field(default_factory=list)
    """Every entry but reports."""

    undone: list[Reports] = field(default_factory=list)
    """For each restart the reports that came after the checkpoint from which it resumed."""

    def take(self, entry: Entry) -> None:
        is_current = entry.token >= self._token
        if isinstance(entry, Launched) and is_current:
            lost = self.reports.after(entry.step)
            if lost:
                self.undone.append(lost)
        super().take(entry)
        if is_current and not isinstance(entry, MetricsReported | ReportBlock):
            self.facts.take(entry)
            self.ranks.take(entry)
            self.timed.append(TimedEntry(self.ledger.wall_s, entry))


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentRun:
    """A run in its storage, as it was when it was read."""

    location: Location
    history: RunRecord
    holder: Holder | None
    """Who holds its lease, or held it last."""

    @property
    def state(self) -> RunState:
        """What has become of it."""
        return run_state(
            succeeded=self.history.succeeded,
            stopped=self.history.is_stopped,
            # Nobody here can look at a driver on another machine: it counts as alive.
            is_held=self.holder is not None and self.holder.is_held is not False,
        )

    @property
    def driver(self) -> str | None:
        """The holder in words; None if there is none."""
        return None if self.holder is None else self.holder.description

    def entries(self) -> Iterator[Entry]:
        """Yield what its journal holds now."""
        return entries(self.location.open().read_log(JOURNAL))


def read_present(location: Location) -> PresentRun | None:
    """Read a run that may be active; None if no driver has opened it.

    A journal says nothing while a run stalls. So the time of a run whose driver lives is counted
    until now; if the driver is on a different machine, until its last heartbeat.

    Raises:
        RunFormatError: another version of polytrain wrote it.
        OSError: the storage can't be read.
    """
    storage = location.open()
    # Before the journal is read: a driver that concludes the run in between hasn't died.
    owner = holder(storage)
    history = read_as(RunRecord, storage.read_log(JOURNAL))
    if history is None:
        return None
    if owner is None or owner.is_held is False:
        # A driver may have begun in between.
        owner = holder(storage)
    if owner is not None and owner.is_held is not False:
        history.ledger.count_until(owner.now() if owner.is_held else owner.beat_at)
    return PresentRun(location=location, history=history, holder=owner)
