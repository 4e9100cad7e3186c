"""What rank 0 has reported, in columns: 8 bytes for each number. Pure."""

from __future__ import annotations

import base64
import reprlib
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from polytrain.storage.typed_json import Count, fitting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kind = Literal["float64", "int64", "json"]
"""Type of a column's values; `json` for everything else that JSON has."""

_CODES: Mapping[Kind, Literal["d", "q"]] = {"float64": "d", "int64": "q"}

_RUNS = list[tuple[Count, Count]]
"""As JSON has it: first row of each run of rows, and step or position of a value there."""


class _WrittenColumn(TypedDict):
    name: str
    kind: Kind
    runs: list[tuple[Count, Count]]
    values: str | list[Any]


_AT_ONCE = 4096
"""Reports that are made into Python objects at once by a loop over them."""

_SHOWN, _LONGEST = 10, 400
"""Reports, and characters, up to which a history is shown in full."""


@dataclass(slots=True)
class _Column:
    """The values of one metric, in those rows that have it."""

    values: Any
    """An array, or a list."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    """First row of each run of rows that have the metric."""

    at: array[int] = field(default_factory=lambda: array("q"))
    """Position of its value."""

    end: int = 0
    """The row after the last run."""

    def add(self, row: int, value: Any) -> None:
        self._extend_to(row, 1)
        self.values.append(value)

    def extend(self, other: _Column, shift: int) -> None:
        """Add another column, whose row 0 is the row `shift` of this one."""
        for row, start, stop in other.runs():
            self._extend_to(row + shift, stop - start)
            # Both are arrays of the same type, or lists.
            self.values += other.values[start:stop]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first row of each run, and where its values begin and end."""
        return zip(self.rows, self.at, [*self.at[1:], len(self.values)], strict=True)

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Yield the rows from `start` to `stop` that have the metric, with their values."""
        first = max(0, bisect_right(self.rows, start) - 1)
        for run in range(first, len(self.rows)):
            row, at = self.rows[run], self.at[run]
            if row >= stop:
                return
            behind = self.at[run + 1] if run + 1 < len(self.at) else len(self.values)
            skipped = max(0, start - row)
            values = self.values[at + skipped : min(behind, at + stop - row)]
            yield from enumerate(values, row + skipped)

    def cut(self, rows: int) -> None:
        """Drop all rows from this one on."""
        while self.rows and self.rows[-1] >= rows:
            del self.values[self.at.pop() :]
            self.rows.pop()
        if self.rows:
            row, at = self.rows[-1], self.at[-1]
            del self.values[at + rows - row :]
            self.end = row + len(self.values) - at

    def _extend_to(self, row: int, count: int) -> None:
        if row != self.end or not self.rows:
            self.rows.append(row)
            self.at.append(len(self.values))
        self.end = row + count


class Reports(Sequence[Mapping[str, Any]]):
    """The metrics of each report, in order, as a tuple of them would hold them.

    They are stored in columns, and made into dicts when they are asked for. Steps ascend.
    """

    def __init__(self) -> None:
        self._count = 0
        self._columns: dict[tuple[str, Kind], _Column] = {}
        self._rows, self._steps = array("q"), array("q")
        """First row and first step of each run of consecutive steps."""

        self._merged: dict[int, dict[str, Any]] = {}
        """Row → metrics that were added after its report."""

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a report."""
        self._add_steps(step)
        for name, value in metrics.items():
            self._column(name, _kind(value)).add(self._count, value)
        self._count += 1

    def merge(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the report of an earlier step, if there is one."""
        run = bisect_right(self._steps, step) - 1
        if run < 0 or not metrics:
            return
        row = self._rows[run] + step - self._steps[run]
        behind = self._rows[run + 1] if run + 1 < len(self._rows) else self._count
        if row < behind:
            self._merged.setdefault(row, {}).update(metrics)

    def extend(self, other: Reports, *, start: int = 0) -> None:
        """Add other reports, from this one of them on."""
        if start:
            for step, metrics in other.since(start):
                self.add(step, metrics)
            return
        for row, step in zip(other._rows, other._steps, strict=True):
            self._add_steps(step, self._count + row)
        for (name, kind), column in other._columns.items():
            self._column(name, kind).extend(column, self._count)
        self._count += other._count

    def drop_after(self, step: int) -> None:
        """Drop all reports of later steps."""
        while self._steps and self._steps[-1] > step:
            self._count = self._rows.pop()
            self._steps.pop()
        if self._steps:
            self._count = min(self._count, self._rows[-1] + step - self._steps[-1] + 1)
        for name, column in list(self._columns.items()):
            column.cut(self._count)
            if not column.rows:
                del self._columns[name]
        self._merged = {row: added for row, added in self._merged.items() if row < self._count}

    @property
    def last_step(self) -> int:
        """The step of the last report; 0 without any."""
        if not self._count:
            return 0
        return self._steps[-1] + self._count - self._rows[-1] - 1

    def steps(self) -> npt.NDArray[np.int64]:
        """Return the step of each report."""
        # Importing numpy takes a while, and a run that isn't resumed doesn't need it.
        import numpy as np

        rows, first = np.array(self._rows, dtype=np.int64), np.array(self._steps, dtype=np.int64)
        lengths = np.diff(rows, append=self._count)
        return np.arange(self._count, dtype=np.int64) + np.repeat(first - rows, lengths)

    def names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        merged = {name for metrics in self._merged.values() for name in metrics}
        return sorted({name for name, _ in self._columns} | merged)

    def since(self, start: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield step and metrics of each report from this one on."""
        steps = self.steps()[start:]
        for at in range(start, self._count, _AT_ONCE):
            metrics = self._metrics(at, min(at + _AT_ONCE, self._count))
            yield from zip(steps[at - start :].tolist(), metrics, strict=False)

    def after(self, step: int) -> Reports:
        """Return a copy of the reports of later steps."""
        later = Reports()
        start = bisect_right(self.steps(), step)
        for each, metrics in self.since(start):
            later.add(each, metrics)
        return later

    def columns(self) -> Iterator[tuple[str, npt.NDArray[np.int64], Sequence[Any]]]:
        """Yield each metric's name, the rows that have it, and its values there.

        A metric whose values have several types comes several times, and again with what was merged
        into reports.
        """
        import numpy as np

        for (name, _), column in self._columns.items():
            rows = [np.arange(row, row + stop - start) for row, start, stop in column.runs()]
            if rows:
                yield name, np.concatenate(rows), column.values
        for row, added in self._merged.items():
            for name, value in added.items():
                yield name, np.array([row]), [value]

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold: `Reports.from_json` reads it."""
        columns = [
            {
                "name": name,
                "kind": kind,
                "runs": list(zip(column.rows, column.at, strict=True)),
                "values": column.values if kind == "json" else encoded_numbers(column.values),
            }
            for (name, kind), column in self._columns.items()
        ]
        steps = list(zip(self._rows, self._steps, strict=True))
        return {"count": self._count, "steps": steps, "columns": columns}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Reports:
        """Read what `to_json` has returned.

        Raises:
            KeyError, ValueError: it is something else.
        """
        reports = cls()
        reports._count = written["count"]
        last = -1
        for row, step in fitting(_RUNS, written["steps"], file="steps"):
            before = reports._rows[-1] if reports._rows else -1
            if row <= before or row >= reports._count or step < last + row - before:
                raise ValueError(f"step {step} is out of order")
            reports._rows.append(row)
            reports._steps.append(step)
            last = step
        if reports._count and reports._rows[:1] != array("q", [0]):
            raise ValueError("the first report has no step")
        for each in fitting(list[_WrittenColumn], written["columns"], file="columns"):
            key = sys.intern(each["name"]), each["kind"]
            if key in reports._columns:
                raise ValueError(f"{each['name']!r} comes twice")
            reports._columns[key] = _read_column(each, reports._count)
        return reports

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Mapping[str, Any], ...]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | tuple[Mapping[str, Any], ...]:
        if isinstance(index, slice):
            start, stop, stride = index.indices(self._count)
            if stride == 1:
                return tuple(self._metrics(start, stop))
            return tuple(self[row] for row in range(start, stop, stride))
        row = range(self._count)[index]
        return self._metrics(row, row + 1)[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for start in range(0, self._count, _AT_ONCE):
            yield from self._metrics(start, min(start + _AT_ONCE, self._count))

    def __add__(self, other: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        return (*self, *other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        text = repr(tuple(self[:_SHOWN]))
        if self._count <= _SHOWN and len(text) <= _LONGEST:
            return text
        return f"<{self._count} reports: {reprlib.repr(self[0])} to {reprlib.repr(self[-1])}>"

    def _add_steps(self, step: int, row: int | None = None) -> None:
        row = self._count if row is None else row
        if not self._steps or self._steps[-1] + row - self._rows[-1] != step:
            self._rows.append(row)
            self._steps.append(step)

    def _column(self, name: str, kind: Kind) -> _Column:
        column = self._columns.get((name, kind))
        if column is None:
            code = _CODES.get(kind)
            column = _Column([] if code is None else array(code))
            # Every line of a journal has its own copy of the same name.
            self._columns[sys.intern(name), kind] = column
        return column

    def _metrics(self, start: int, stop: int) -> list[dict[str, Any]]:
        metrics: list[dict[str, Any]] = [{} for _ in range(start, stop)]
        for (name, _), column in self._columns.items():
            for row, value in column.read(start, stop):
                metrics[row - start][name] = value
        for row, added in self._merged.items():
            if start <= row < stop:
                metrics[row - start].update(added)
        return metrics


def _read_column(written: _WrittenColumn, count: int) -> _Column:
    name, runs, values = written["name"], written["runs"], written["values"]
    code = _CODES.get(written["kind"])
    if code is not None and isinstance(values, str):
        column = _Column(decoded_numbers(values, code))
    elif code is None and isinstance(values, list):
        column = _Column(values)
    else:
        raise ValueError(f"{name!r} has values of another type")
    ends = [*(at for _, at in runs[1:]), len(column.values)]
    if [at for _, at in runs[:1]] != [0] * bool(len(column.values)):
        raise ValueError(f"{name!r} has values of no report")
    for (row, at), end in zip(runs, ends, strict=False):
        if row < column.end or end <= at:
            raise ValueError(f"{name!r} has values out of order")
        column.rows.append(row)
        column.at.append(at)
        column.end = row + end - at
    if column.end > count:
        raise ValueError(f"{name!r} has values after the last report")
    return column


def _kind(value: Any) -> Kind:
    if type(value) is float:
        return "float64"
    return "int64" if type(value) is int and -(2**63) <= value < 2**63 else "json"


def encoded_numbers(numbers: array[Any]) -> str:
    """Return numbers of 8 bytes as text: little-endian, in base64."""
    return base64.b64encode(_little_endian(numbers).tobytes()).decode()


def decoded_numbers(text: str, code: Literal["d", "q"]) -> array[Any]:
    """Read what `encoded_numbers` has returned."""
    return _little_endian(array(code, base64.b64decode(text)))


def _little_endian(numbers: array[Any]) -> array[Any]:
    if sys.byteorder == "little":
        return numbers
    swapped = numbers[:]
    swapped.byteswap()
    return swapped
