"""A run as it is now: what its journal says, and who holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytrain.record.entries import Entry, MetricsReported, ReportBlock
from polytrain.record.history import JOURNAL, Kind, RunHistory, read_as
from polytrain.record.run_facts import RunFacts
from polytrain.run.lease import Holder, holder
from polytrain.storage.protocol import Storage
from polytrain.view.ranks import RankRecords


@dataclass
class ShownHistory(RunHistory):
    """A run's history, with what it was started with, and what its journal says of each rank."""

    facts: RunFacts = field(default_factory=RunFacts)
    ranks: RankRecords = field(default_factory=RankRecords)

    def take(self, entry: Entry) -> None:
        is_current = entry.token >= self._token
        super().take(entry)
        if is_current and not isinstance(entry, MetricsReported | ReportBlock):
            self.take_event(entry)

    def take_event(self, entry: Entry) -> None:
        """Take an entry that counts, and that is no report; the history has it already."""
        self.facts.take(entry)
        self.ranks.take(entry)


def read_present(kind: type[Kind], storage: Storage) -> tuple[Kind, Holder | None] | None:
    """Read a run that may be active; None if no driver has opened it.

    A journal says nothing while a run stalls. So the time of a run whose driver lives is counted
    until now; if the driver is on a different machine, until its last heartbeat.

    Args:
        kind: the kind of history.
        storage: the run's.

    Raises:
        RunFormatError: another version of polytrain wrote it.
        OSError: the storage can't be read.
    """
    # Before the journal is read: a driver that concludes the run in between hasn't died.
    owner = holder(storage)
    run_history = read_as(kind, storage.read_log(JOURNAL))
    if run_history is None:
        return None
    if owner is None or owner.is_held is False:
        # A driver may have begun in between.
        owner = holder(storage)
    if owner is not None and owner.is_held is not False:
        run_history.ledger.count_until(owner.now() if owner.is_held else owner.beat_at)
    return run_history, owner
