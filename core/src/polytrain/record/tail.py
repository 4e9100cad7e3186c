"""What is new in a journal that another process writes, for those that follow a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polytrain.record.history import new_reports
from polytrain.record.ledger import Ledger

_OF_OTHER_RANKS = ("RankReported", "RankReports")
_REPORTS = ("Reported", "Reports")


def tail_of(entries: Iterable[Mapping[str, Any]]) -> JournalTail:
    """Return the tail of a journal from where the run was last started over."""
    lines, skipped, token = 0, 0, -1
    for entry in entries:
        if entry["event"] in _REPORTS or entry["event"] in _OF_OTHER_RANKS:
            continue
        if entry["event"] == "Opened" and entry["anew"]:
            skipped, token = lines, entry["token"]
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

    def news(self, entries: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the new lines, in order. Of many reports in one line the last is yielded.

        Args:
            entries: all that the journal has now.
        """
        lines = 0
        for entry in entries:
            if entry["event"] in _REPORTS:
                yield from self._new_reports(entry)
            elif entry["event"] not in _OF_OTHER_RANKS:
                lines += 1
                if lines > self._taken and entry["token"] >= self._token:
                    self._token = entry["token"]
                    self.ledger.take(entry)
                    yield entry
        self._taken = max(self._taken, lines)

    def _new_reports(self, entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        token = entry["token"]
        new = new_reports(entry, self._reports.get(token, 0))
        if new is None or token < self._token:
            return
        self._reports[token] = new.behind
        if entry["event"] == "Reported":
            self.ledger.take(entry)
            yield entry
            return
        steps = new.reports.steps()
        self.ledger.take_reports(new.times, steps, new.stalled_s, start=new.start)
        yield {
            "time": new.times[-1],
            "token": token,
            "event": "Reported",
            "step": int(steps[-1]),
            "metrics": new.reports[-1],
        }
