"""A tracker that writes JSON Lines: one object for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from polytrain.text import strict_json
from polytrain.trackers.text_file import FileTracker, TextFile
from polytrain.trackers.tracker import Row, TrackedRun


@dataclass(frozen=True)
class JSONLines(FileTracker):
    """Writes a line `{"step": …, "time": …, "metrics": {…}}` for each step to one file.

    NaN and infinities are null; the line's `not_finite` says which is which.

    Args:
        path: the file; by default `metrics.jsonl` in the run's directory.
    """

    name: ClassVar[str] = "jsonl"
    suffix: ClassVar[str] = ".jsonl"

    def open(self, run: TrackedRun) -> TextFile:
        return _JSONLinesFile(self.file(run))


class _JSONLinesFile(TextFile):
    begins = '{"step": '

    def read(self) -> list[Row]:
        rows = []
        for line in (self.content() or b"").split(b"\n")[:-1]:
            try:
                rows.append(Row(**strict_json.loads(line)))
            except (TypeError, ValueError):
                # What comes behind a damaged line is written again.
                break
        return rows

    def text(self, rows: Sequence[Row]) -> str:
        return self.lines(rows)

    def lines(self, rows: Sequence[Row]) -> str:
        return "".join(
            strict_json.dumps({"step": row.step, "time": row.time, "metrics": row.metrics}) + "\n"
            for row in rows
        )
