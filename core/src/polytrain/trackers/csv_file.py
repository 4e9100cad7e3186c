"""A tracker that writes a CSV file: a line for each step, a column for each metric."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polytrain.trackers.text_file import FileTracker, TextFile
from polytrain.trackers.tracker import Row, TrackedRun

_FIRST = ["step", "time"]


@dataclass(frozen=True)
class CSV(FileTracker):
    """Writes a line for each step to one file, with a column for each metric.

    A metric that a report doesn't have is empty. If a metric is new, the file is replaced by one
    with its column. Metrics that aren't numbers are written as JSON.

    Args:
        path: the file; by default `metrics.csv` in the run's directory.
    """

    name: ClassVar[str] = "csv"
    suffix: ClassVar[str] = ".csv"

    def open(self, run: TrackedRun) -> TextFile:
        return _CSVFile(self.file(run))


class _CSVFile(TextFile):
    begins = ",".join(_FIRST)
    _columns: list[str]

    def read(self) -> list[Row]:
        self._columns, self._has_header = [], False
        text = (self.content() or b"").decode(errors="replace")
        complete = text[: text.rfind("\n") + 1]
        header, *lines = csv.reader(io.StringIO(complete, newline="")) if complete else ([],)
        self._columns, self._has_header = header[len(_FIRST) :], bool(complete)
        rows = []
        for line in lines:
            try:
                rows.append(self._row(line))
            except ValueError:
                break
        return rows

    def text(self, rows: Sequence[Row]) -> str:
        self._columns = list(dict.fromkeys(name for row in rows for name in row.metrics))
        self._has_header = bool(rows)
        return _written([_FIRST + self._columns, *map(self._line, rows)]) if rows else ""

    def lines(self, rows: Sequence[Row]) -> str | None:
        known = {name for row in rows for name in row.metrics} <= set(self._columns)
        if not self._has_header or not known:
            return None
        return _written(map(self._line, rows))

    def _line(self, row: Row) -> list[Any]:
        cells = (_cell(row.metrics[name]) if name in row.metrics else "" for name in self._columns)
        return [row.step, repr(row.time), *cells]

    def _row(self, line: Sequence[str]) -> Row:
        step, time, *cells = line
        if len(cells) != len(self._columns):
            raise ValueError("an incomplete line")
        metrics = {
            name: json.loads(cell)
            for name, cell in zip(self._columns, cells, strict=True)
            if cell != ""
        }
        return Row(step=int(step), time=float(time), metrics=metrics)


def _cell(value: Any) -> str:
    # NaN and infinities in the words that Python's and pandas' readers take.
    return json.dumps(value)


def _written(lines: Any) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
