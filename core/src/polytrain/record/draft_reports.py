"""Reports that the journal doesn't hold for good yet, and how many of them make one line."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from polytrain.record.reports import Reports, encoded
from polytrain.text import strict_json

_FEW = 16
"""Reports that take less room as lines of their own."""


class DraftReports:
    """Reports that aren't in the journal for good."""

    def __init__(self, first: int = 0, *, rank: int = 0) -> None:
        """
        Args:
            first: number of this driver's reports before.
            rank: the rank that makes them.
        """
        self._first = first
        self._rank = rank
        self._lines: list[str] = []
        self._reports = Reports()
        self._times = array("d")
        self._stalled: list[tuple[int, float]] = []
        """Position and value, where it has changed."""

    @property
    def written(self) -> int:
        """Number of this driver's reports, these included."""
        return self._first + len(self._lines)

    def next(self) -> DraftReports:
        """The drafts that follow these."""
        return DraftReports(self.written, rank=self._rank)

    def add(self, entry: Mapping[str, Any], line: str) -> None:
        stalled_s = entry.get("stalled_s", 0.0)
        if stalled_s != (self._stalled[-1][1] if self._stalled else 0.0):
            self._stalled.append((len(self), stalled_s))
        self._lines.append(line)
        self._times.append(entry["time"])
        self._reports.add(entry["step"], entry["metrics"])

    def text(self, token: int) -> str:
        """Return them as lines."""
        if len(self) < _FEW:
            return "".join(self._lines)
        entry = {
            "time": self._times[-1],
            "token": token,
            **(
                {"event": "RankReports", "rank": self._rank} if self._rank else {"event": "Reports"}
            ),
            "n": self._first,
            "times": encoded(self._times),
            "stalled_s": self._stalled,
            **self._reports.to_json(),
        }
        return strict_json.dumps(entry) + "\n"

    def __len__(self) -> int:
        return len(self._lines)
