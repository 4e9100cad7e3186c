"""The run's journal: one JSON line for everything that changes its state, with the reason.

It is only ever appended to, by one driver after another; `history` reads it. Of what a rank reports
between two such lines, many reports make one line, in columns. Until they do, each is a draft.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from polytrain.events.attempt import Reported
from polytrain.functions.return_values import Returned, to_bytes
from polytrain.linux.clock import Clock
from polytrain.record.entries import (
    AttemptEnded,
    ClockChanged,
    Closed,
    Entry,
    LoadMeasured,
    MetricsReported,
    Opened,
    RunConcluded,
    ValuesReturned,
    encoded,
)
from polytrain.record.history import JOURNAL, RunHistory
from polytrain.record.lines import DraftReports, LoadLines
from polytrain.storage.protocol import Log, Storage, storage_errors
from polytrain.text import strict_json

logger = logging.getLogger(__name__)

Take = Callable[[Entry], None]
"""Takes an entry, in the thread that has written it. It waits for nothing, and never raises."""


class News:
    """Passes each entry on, in order, once it is written and the run's record has it.

    Reports of ranks above 0 come too, whether or not the journal keeps them.
    """

    def __init__(self) -> None:
        self._subscribers: list[Take] = []

    def subscribe(self, take: Take) -> None:
        """Have each later entry passed on."""
        self._subscribers.append(take)

    def publish(self, entry: Entry) -> None:
        """Pass an entry on to all that have subscribed."""
        for take in self._subscribers:
            take(entry)


Written = TypeVar("Written", bound=Entry)

_FULL = 4096
"""Reports that make a line."""

_UNSYNCED = 4 << 20
"""Bytes in memory alone that are worth a sync."""


_NOTED_S = 1.0
"""Least change of the machine's clock that is noted: smaller ones are corrections."""


class Journal:
    """Appends entries to the journal. Threads may share it.

    All that writes raises `StorageError` if it can't.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        token: int,
        history: RunHistory | None = None,
        news: News | None = None,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            token: fencing token of this driver's lease, which is in every line.
            history: of the journal so far, which is kept up to date; that of a new run by default.
            news: gets each entry, once it is written and the history has it.
            clock: what each line's time is read from; began with this journal by default.
        """
        self.history = RunHistory(since_token=token) if history is None else history
        self.news = News() if news is None else news
        self.clock = Clock() if clock is None else clock
        self._storage = storage
        self._log: Log = storage.open_log(JOURNAL, series=f"{token:06d}")
        self._token = token
        self._lock = threading.Lock()
        self._drafts: dict[int, DraftReports] = {}
        """By rank; of ranks that have reported since the last line."""

        self._reported: dict[int, int] = {}
        """Rank → number of this driver's reports before those."""

        self._loads = LoadLines()
        self._ahead_s = 0.0
        """How far the machine's clock is ahead, as far as it is noted."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            with self._log, self._lock:
                self._append("")
        except OSError as unwritten:
            # Important lines are synced earlier, and another error ends the run here.
            logger.warning("The end of the journal can't be written: %s", unwritten)

    def write(self, entry: Entry) -> None:
        """Write an entry, with the time and this driver's token."""
        match entry:
            case LoadMeasured():
                self._write_load(entry)
            case Opened():
                self._write(entry)
                self.sync()
            case AttemptEnded():
                self._write_rest_of_loads()
                self._write(entry)
            case RunConcluded():
                self._write_rest_of_loads()
                self._write(entry)
                self.sync()
            case _:
                self._write(entry)

    def report(self, report: Reported, *, is_kept: bool = True) -> None:
        """Write a report of a rank.

        Args:
            is_kept: whether the journal has it; if not, it is passed on alone.
        """
        if report.rank == 0:
            self._note_clock()
        if not is_kept:
            self.news.publish(self._entry_of(report, n=0))
            return
        # A block doesn't say who has made a report.
        is_alone = report.survivor is not None
        with self._lock, storage_errors():
            if is_alone:
                self._append("")
            drafts = self._drafts.get(report.rank)
            if drafts is None:
                first = self._reported.get(report.rank, 0)
                drafts = self._drafts[report.rank] = DraftReports(first, rank=report.rank)
            entry = self._entry_of(report, n=drafts.written)
            self.history.take(entry)
            line = strict_json.dumps(encoded(entry)) + "\n"
            drafts.add(entry, line)
            if len(drafts) < _FULL and not is_alone:
                self._log.draft(line)
            else:
                self._append("")
        self.news.publish(entry)

    def returned(self, values: Sequence[Returned | None]) -> None:
        """Store what the training functions have returned, beside the journal, and note it.

        Args:
            values: each rank's; empty if no rank has returned anything.
        """
        if not values:
            return
        file = f"return_values-{self._token:06d}.msgpack"
        with storage_errors():
            self._storage.write(file, to_bytes(values))
        self.write(ValuesReturned(file=file))

    def closed(self) -> None:
        """Note that this driver has released all resources.

        Never raises, because an error here must not change the result.
        """
        try:
            self.write(Closed())
        except OSError as unwritten:
            logger.warning("The end of the journal can't be written: %s", unwritten)

    def sync(self) -> None:
        """Return once all lines survive a crash of this machine."""
        with storage_errors():
            with self._lock:
                self._append("")
            self._log.sync()

    @property
    def wants_sync(self) -> bool:
        """Whether much of it is in this process's memory alone."""
        return self._log.unsynced > _UNSYNCED

    def _write(self, entry: Entry) -> None:
        # A driver's first line is `Opened`.
        if not isinstance(entry, Opened):
            self._note_clock()
        entry = self._stamped(entry)
        self.history.take(entry)
        line = strict_json.dumps(encoded(entry)) + "\n"
        with self._lock, storage_errors():
            self._append(line)
        self.news.publish(entry)

    def _entry_of(self, report: Reported, *, n: int) -> MetricsReported:
        return MetricsReported(
            time=self.clock.now(),
            token=self._token,
            rank=report.rank,
            n=n,
            step=report.step,
            metrics=report.metrics,
            stalled_s=0.0 if report.rank else round(report.stalled_s, 6),
            copied_s=0.0 if report.rank else round(report.copied_s, 6),
            attempt=report.attempt,
            at=report.at,
            survivor=report.survivor,
            has_checkpoint=report.has_checkpoint,
        )

    def _write_load(self, load: LoadMeasured) -> None:
        busy = [round(share, 2) for share in load.busy]
        cpu = tuple(round(cpus, 2) for cpus in load.cpu)
        window = self._stamped(replace(load, busy=busy, cpu=cpu))
        entry = self._loads.add(window)
        if entry is None:
            self.news.publish(window)
        else:
            self._write(entry)

    def _write_rest_of_loads(self) -> None:
        """Write the windows of an attempt that ends, and that no line has yet."""
        entry = self._loads.rest()
        if entry is not None:
            self._write(entry)

    def _note_clock(self) -> None:
        """Note by how much the machine's clock was set, or how long it was suspended."""
        with self._lock:
            by_s = self.clock.ahead_s() - self._ahead_s
            if abs(by_s) < _NOTED_S:
                return
            self._ahead_s += by_s
        logger.warning(
            "This machine's clock was set by %+.0f s, or the machine was suspended. The times of "
            "the run are counted without that.",
            by_s,
        )
        self._write(ClockChanged(by_s=round(by_s, 3)))

    def _stamped(self, entry: Written) -> Written:
        return replace(entry, time=self.clock.now(), token=self._token)

    def _append(self, line: str) -> None:
        """Append the drafts, for good, and a line."""
        text = "".join(each.text(self._token) for each in self._drafts.values()) + line
        self._reported |= {rank: drafts.written for rank, drafts in self._drafts.items()}
        self._drafts.clear()
        if text:
            self._log.write(text)
