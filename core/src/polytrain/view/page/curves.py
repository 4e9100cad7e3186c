"""The metrics of a run as curves of few points. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from polytrain.record.reports import Reports
from polytrain.text.described import shortened
from polytrain.text.metrics import flat

MOST_CURVES = 64
"""Metrics that are drawn; of the others the page has the last value."""

_POINTS = 5000
"""Points of all curves together, about: what keeps a page small."""

_MOST_POINTS = 1000
_FEWEST_POINTS = 60
"""Points of one curve."""

MOST_UNDONE = 20
"""Restarts of which the repeated steps are drawn: the last ones."""

_FEWEST_UNDONE = 8
"""Points of what one restart has undone."""

_DIGITS = 6
"""Significant digits of a value, at the least."""

_LONGEST = 200
"""Characters of a value that isn't a number."""

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Part of a curve."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    """To six digits, or to more if the curve's range needs them; None where it isn't finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What was reported under one name; nested names are joined by slashes."""

    name: str
    last: Any
    """The last value, a number or not."""

    reports: int
    """How many reports had it."""

    lowest: float | None = None
    highest: float | None = None
    lowest_step: int | None = None
    highest_step: int | None = None
    """The first steps that have these values."""

    not_finite: int = 0
    """How many of its values are NaN or infinite."""

    curve: Points | None = None
    """None if it isn't a number, or if there are too many metrics."""

    undone: tuple[Points, ...] = ()
    """What was reported and then done again, by restart."""

    @property
    def is_decimated(self) -> bool:
        """Whether the curve has fewer points than there were reports."""
        return self.curve is not None and len(self.curve.steps) < self.reports

    @property
    def spread(self) -> float:
        """Between the lowest and the highest value."""
        if self.lowest is None or self.highest is None:
            return 0.0
        return self.highest - self.lowest


def metrics_of(reports: Reports, undone: Sequence[Reports]) -> tuple[Metric, ...]:
    """Return every metric, in the order in which they were first reported.

    Args:
        reports: the reports that count.
        undone: those that a restart has undone, by restart.
    """
    columns = _columns(reports)
    drawn = [name for name, column in columns.items() if column.is_numeric][:MOST_CURVES]
    lost = [_columns(each, only=frozenset(drawn)) for each in undone[-MOST_UNDONE:]]
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS // max(1, len(drawn))))
    return tuple(
        _metric(column, most if name in drawn else 0, [each[name] for each in lost if name in each])
        for name, column in columns.items()
    )


def decimated(values: Floats, most: int) -> npt.NDArray[np.int64]:
    """Return which of many values to draw: the lowest and the highest of each stretch.

    Args:
        values: the values, in order.
        most: how many to return, about; where values between two of them aren't finite, one of
            those is returned, too, so that no line bridges the gap.
    """
    if len(values) <= most:
        return np.arange(len(values), dtype=np.int64)
    kept = {0, len(values) - 1}
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    edges = np.linspace(0, len(values), max(1, most // 2) + 1).astype(np.int64)
    for start, stop in pairwise(edges.tolist()):
        part = slice(start, stop)
        if finite[part].any():
            kept |= {int(start + low[part].argmin()), int(start + high[part].argmax())}
    chosen = np.array(sorted(kept), dtype=np.int64)
    gaps = np.flatnonzero(~finite)
    following = np.searchsorted(gaps, chosen[:-1], side="right")
    is_bridged = np.append(gaps, len(values))[following] < chosen[1:]
    return np.union1d(chosen, gaps[following[is_bridged]])


class _Column:
    """The values of one metric, and their steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last: tuple[int, Any] = (-1, None)
        self.count = 0
        self._numbers: list[tuple[Steps, Floats]] = []

    @property
    def is_numeric(self) -> bool:
        return bool(self._numbers)

    def add(self, steps: Steps, values: Sequence[Any]) -> None:
        self.count += len(values)
        if len(values) and steps[-1] >= self.last[0]:
            self.last = int(steps[-1]), values[-1]
        numbers = _numbers(steps, values)
        if len(numbers[0]):
            self._numbers.append(numbers)

    def numbers(self) -> tuple[Steps, Floats]:
        steps = np.concatenate([steps for steps, _ in self._numbers])
        values = np.concatenate([values for _, values in self._numbers])
        # The later of two values of a step counts, as in the report.
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        is_last = np.append(steps[1:] != steps[:-1], True)
        return steps[is_last], values[is_last]


def _columns(reports: Reports, only: frozenset[str] | None = None) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    steps = reports.steps()
    for name, rows, values in reports.columns():
        for path, at, some in _flat(name, steps[rows], values):
            if only is None or path in only:
                columns.setdefault(path, _Column(path)).add(at, some)
    return columns


def _flat(
    name: str, steps: Steps, values: Sequence[Any]
) -> Iterator[tuple[str, Steps, Sequence[Any]]]:
    """Yield the columns that a column of metrics, nested or not, consists of."""
    if not isinstance(values, list):
        yield name, steps, values
        return
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for step, value in zip(steps.tolist(), values, strict=True):
        for path, leaf in flat({name: value}).items():
            at, some = found.setdefault(path, ([], []))
            at.append(step)
            some.append(leaf)
    for path, (at, some) in found.items():
        yield path, np.array(at, dtype=np.int64), some


def _numbers(steps: Steps, values: Sequence[Any]) -> tuple[Steps, Floats]:
    if not isinstance(values, list):
        return steps, np.asarray(values, dtype=np.float64)
    rows = [row for row, value in enumerate(values) if isinstance(value, int | float)]
    return steps[rows], np.array([_as_float(values[row]) for row in rows], dtype=np.float64)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _metric(column: _Column, most: int, undone: Sequence[_Column]) -> Metric:
    if not column.is_numeric:
        return Metric(name=column.name, last=_shown(column.last[1]), reports=column.count)
    steps, values = column.numbers()
    is_finite = np.isfinite(values)
    finite, at = values[is_finite], steps[is_finite]
    return Metric(
        name=column.name,
        last=_shown(column.last[1]),
        reports=column.count,
        lowest=float(finite.min()) if len(finite) else None,
        highest=float(finite.max()) if len(finite) else None,
        lowest_step=int(at[finite.argmin()]) if len(finite) else None,
        highest_step=int(at[finite.argmax()]) if len(finite) else None,
        not_finite=len(values) - len(finite),
        curve=_points(steps, values, most) if most else None,
        undone=tuple(
            _points(*each.numbers(), max(_FEWEST_UNDONE, most // max(4, len(undone))))
            for each in undone
            if most and each.is_numeric
        ),
    )


def _points(steps: Steps, values: Floats, most: int) -> Points:
    kept = decimated(values, most)
    drawn = values[kept]
    finite = drawn[np.isfinite(drawn)]
    spread = float(finite.max()) - float(finite.min()) if len(finite) else 0.0
    return Points(
        steps=tuple(steps[kept].tolist()),
        values=tuple(
            float(f"{value:.{digits(value, spread)}g}") if math.isfinite(value) else None
            for value in drawn.tolist()
        ),
    )


def digits(value: float, spread: float) -> int:
    """Return how many significant digits a value needs among others.

    Args:
        spread: between the lowest and the highest of them; a ten-thousandth of it is seen.
    """
    if value == 0 or not 0 < spread < math.inf:
        return _DIGITS
    needed = math.floor(math.log10(abs(value))) - math.floor(math.log10(spread)) + 5
    return min(17, max(_DIGITS, needed))


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return shortened(str(value), _LONGEST)
