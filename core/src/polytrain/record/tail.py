"""What is new in a journal that another process writes, for those that follow a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polytrain.record.entries import Entry, MetricsReported, Opened, ReportBlock
from polytrain.record.ledger import Ledger
from polytrain.record.lines import new_reports


def tail_of(entries: Iterable[Entry]) -> JournalTail:
    """Return the tail of a journal from where the run was last started over."""
    lines, skipped, token = 0, 0, -1
    for entry in entries:
        if isinstance(entry, MetricsReported | ReportBlock):
            continue
        if isinstance(entry, Opened) and entry.anew:
            skipped, token = lines, entry.token
        lines += 1
    return JournalTail(skipped=skipped, token=token)


class JournalTail:
    """Takes a journal again and again, each time from its start, and yields what it hasn't yet."""

    def __init__(self, *, skipped: int = 0, token: int = -1) -> None:
        """
        Args:
            skipped: lines, without those of reports, that belong to an earlier run.
            token: fencing token of the first driver that counts.
        """
        self.ledger = Ledger()
        """Of all that was yielded: it has each line before that is."""

        self._taken = skipped
        self._token = token
        self._reports: dict[int, int] = {}
        """Fencing token of a driver → how many of its reports are known."""

    def news(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the new lines, in order. Of many reports in one line the last is yielded."""
        lines = 0
        for entry in entries:
            if isinstance(entry, MetricsReported | ReportBlock):
                if entry.rank == 0:
                    yield from self._new_reports(entry)
                continue
            lines += 1
            if lines > self._taken and entry.token >= self._token:
                self._token = entry.token
                self.ledger.take(entry)
                yield entry
        self._taken = max(self._taken, lines)

    def _new_reports(self, entry: MetricsReported | ReportBlock) -> Iterator[Entry]:
        token = entry.token
        new = new_reports(entry, self._reports.get(token, 0))
        if new is None or token < self._token:
            return
        self._reports[token] = new.behind
        if isinstance(entry, MetricsReported):
            self.ledger.take(entry)
            yield entry
            return
        steps = new.reports.steps()
        self.ledger.take_reports(new.times, steps, new.stalled_s, new.copied_s, start=new.start)
        yield MetricsReported(
            time=new.times[-1],
            token=token,
            n=new.behind - 1,
            step=int(steps[-1]),
            metrics=new.reports[-1],
        )
