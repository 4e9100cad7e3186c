"""A tracker that writes a CSV file: a line for each step, a column for each metric."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from polytrain.storage.beneath import Beneath
from polytrain.trackers.description import Description
from polytrain.trackers.tracker import FileTracker, Row, TrackedRun
from polytrain_plugins import Problem

_FILE = "metrics.csv"
_FIRST = ["step", "time"]
_BEGINS = ",".join(_FIRST)
"""The beginning of the tracker's files: any other file is somebody else's."""


@dataclass(frozen=True)
class CSV(FileTracker):
    """Writes a line for each step to one file, with a column for each metric.

    A metric that a report lacks is empty. A new metric replaces the file by one with its column.
    Metrics that aren't numbers are written as JSON. A metric `step` or `time` is `xstep` or
    `xtime`: the columns of these names are the report's.

    Args:
        path: the file; by default `metrics.csv` in the run's directory.
    """

    name: ClassVar[str] = "csv"
    _option: ClassVar[str] = "path"
    _usual: ClassVar[str] = _FILE

    path: str | None = None
    """The file; by default `metrics.csv` in the run's directory."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if isinstance(self.path, str | Path) and self.path != "" and Path(self.path).is_dir():
            yield Problem(
                field="CSV.path",
                what=f"{self.path} is a directory",
                remedy=f'Give a file, for example "{self.path}/{_FILE}"',
            )

    def open(self, run: TrackedRun) -> CSVFile:
        """Open the run's file.

        Raises:
            FileExistsError: it isn't this run's.
        """
        if self.path is None:
            if run.directory is None:
                raise ValueError(f"{run.address} isn't a directory: give CSV a path")
            return CSVFile(run.directory / _FILE)
        path = Path(self.path)
        if not run.run_id and path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} exists, and isn't of this run: give another path")
        return CSVFile(path)


class CSVFile:
    """A file of rows, which is appended to, and replaced as a whole if earlier rows change."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            FileExistsError: it doesn't begin like this tracker's files.
        """
        self.run_id = str(path)
        self._files = Beneath(path.parent)
        self._name = path.name
        self._expect_own()
        rows = self.read()
        self.sent: int = rows[-1].step if rows else 0
        # Remove an incomplete line, whose writer died: it would damage the next one.
        content = self._content()
        if content is not None and content != self._text(rows).encode():
            self._replace(rows)

    def read(self) -> list[Row]:
        """Return the complete rows of the file."""
        self._columns: list[str] = []
        self._has_header = False
        text = (self._content() or b"").decode(errors="replace")
        complete = text[: text.rfind("\n") + 1]
        # A list or a text may be longer than the process's limit.
        csv.field_size_limit(max(csv.field_size_limit(), len(complete)))
        header, *lines = csv.reader(io.StringIO(complete, newline="")) if complete else ([],)
        self._columns, self._has_header = header[len(_FIRST) :], bool(complete)
        rows = []
        for line in lines:
            try:
                rows.append(self._row(line))
            except ValueError:
                # Rows after a damaged line are written again.
                break
        return rows

    def write(self, rows: Sequence[Row]) -> None:
        # Skip rows of a process that died before it could note that they were sent.
        rows = [_renamed(row) for row in rows if row.step > self.sent]
        if not rows:
            return
        if self._has_header and {name for row in rows for name in row.metrics} <= {*self._columns}:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(self._files.open(self._name, flags), "ab") as file:
                file.write(_written(map(self._line, rows)).encode())
        else:
            self._replace([*self.read(), *rows])
        self.sent = rows[-1].step

    def rewind(self, step: int) -> None:
        if step < self.sent:
            self._replace([row for row in self.read() if row.step <= step])
            self.sent = step

    def amend(self, row: Row) -> None:
        row = _renamed(row)
        self._replace(
            [
                replace(old, metrics={**old.metrics, **row.metrics})
                if old.step == row.step
                else old
                for old in self.read()
            ]
        )

    def describe(self, description: Description) -> None:
        """Do nothing: the file holds only rows."""
        return

    def finish(self, summary: Mapping[str, object], *, succeeded: bool) -> None:
        """Do nothing: the file holds only rows."""
        return

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._files.reading(self._name) as file:
            os.fsync(file.fileno())

    def _content(self) -> bytes | None:
        """Return the file's content; None if it doesn't exist."""
        try:
            with self._files.reading(self._name, single=True) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _expect_own(self) -> None:
        try:
            with self._files.reading(self._name, single=True) as file:
                begin = file.read(len(_BEGINS)).decode(errors="replace")
        except FileNotFoundError:
            return
        # A writer that died may have left only a part of the first line.
        if not _BEGINS.startswith(begin):
            raise FileExistsError(
                f"{self.run_id} begins with {begin!r}, not with {_BEGINS!r}: it isn't a file "
                "of this tracker, and stays as it is. Give another path, or move the file away"
            )

    def _replace(self, rows: Sequence[Row]) -> None:
        """Replace the file atomically: a reader sees the old or the new one."""
        with self._files.new_file(self._name) as new:
            new.file.write(self._text(rows).encode())
            new.replace()

    def _text(self, rows: Sequence[Row]) -> str:
        """Return the content of a file with these rows."""
        self._columns = list(dict.fromkeys(name for row in rows for name in row.metrics))
        self._has_header = bool(rows)
        return _written([_FIRST + self._columns, *map(self._line, rows)]) if rows else ""

    def _line(self, row: Row) -> list[Any]:
        # Write NaN and infinities as the words that Python's and pandas' readers accept.
        metrics = row.metrics
        cells = (json.dumps(metrics[name]) if name in metrics else "" for name in self._columns)
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


def _renamed(row: Row) -> Row:
    """Return a row without metrics that are named as the first columns."""
    if row.metrics.keys().isdisjoint(_FIRST):
        return row
    return replace(
        row, metrics={_free(name, row.metrics): row.metrics[name] for name in row.metrics}
    )


def _free(name: str, metrics: Collection[str]) -> str:
    """Return a metric's column, which is no other metric's."""
    if name not in _FIRST:
        return name
    while (name := f"x{name}") in metrics:
        pass
    return name


def _written(lines: Iterable[Sequence[Any]]) -> str:
    written: list[str] = []
    # With this line end the writer also quotes names with a carriage return, where readers end one.
    csv.writer(SimpleNamespace(write=written.append), lineterminator="\r\n").writerows(lines)
    return "".join(f"{line[:-2]}\n" for line in written)
