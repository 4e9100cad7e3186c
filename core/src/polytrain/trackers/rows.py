"""Decides which rows a tracker still lacks: a fold over the entries of a run's journal. Pure."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Annotated

from polytrain.record.entries import (
    CheckpointCommitted,
    Entry,
    Launched,
    LoadMeasured,
    MetricsReported,
    Opened,
    ReportBlock,
    RunConcluded,
    ValidationEnded,
)
from polytrain.record.lines import new_reports
from polytrain.record.reports import Reports
from polytrain.storage.typed_json import Count, Within
from polytrain.text.metrics import flat
from polytrain.trackers.tracker import Row

_AT_ONCE = 1000
"""Maximum rows that are sent together."""

_ALL = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A tracker's position in a run's journal."""

    since: Annotated[int, Within(-1, 2**62)] = -1
    """Fencing token of the driver that started the run, or started it over."""

    launches: Count = 0
    """Number of attempts whose start the tracker has handled."""

    sent: Count = 0
    """The last step that was sent."""

    amendments: Count = 0
    """Number of validations whose metrics were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreChanges:
    """The next changes to a store, in this order."""

    rewind: int | None
    """Remove all rows after this step; None if all rows stay."""

    rows: tuple[Row, ...]
    amendments: tuple[Row, ...]
    """Metrics for steps that were sent before."""

    position: Position
    """The tracker's position after these changes."""

    @property
    def is_empty(self) -> bool:
        return self.rewind is None and not self.rows and not self.amendments


class TrackedRows:
    """The rows that a tracker lacks.

    A restart repeats steps. A tracker that can remove rows gets them as soon as they are reported,
    and removes those that a restart undoes. Any other gets a row once a checkpoint covers it, or
    the run is finished: then no restart undoes it. Where divergence takes a run back, a checkpoint
    covers its rows only once every rank has made a good report after it: without one, a rank may
    find that it holds what has diverged, or two attempts that start from it may blame it. If a
    restart undoes more all the same, because a checkpoint is damaged, or is blamed by attempts that
    don't repeat what they computed before, the tracker keeps its rows, and they aren't sent again.
    """

    def __init__(
        self,
        position: Position,
        *,
        can_rewind: bool,
        can_amend: bool = True,
        all_rows: bool = False,
        has_loads: bool = False,
    ) -> None:
        """
        Args:
            position: the tracker's position in the run since it was last started over.
            can_rewind: whether the tracker can remove rows.
            can_amend: whether the tracker can add metrics to earlier rows.
            all_rows: whether it also gets rows that a restart may undo.
            has_loads: whether rows have system metrics.
        """
        self.position = position
        self._can_rewind = can_rewind
        self._can_amend = can_amend
        self._is_final = can_rewind or all_rows
        self._has_loads = has_loads
        self._load: Mapping[str, float] = {}
        """System metrics for the next row."""

        self._loads: dict[int, Mapping[str, float]] = {}
        """Step → system metrics in its row."""

        self._settled = _ALL if self._is_final else 0
        """The last step that is ready to be sent."""

        self._covering: list[int] = []
        """Steps of checkpoints since then: a divergence may undo them yet."""

        self._token = -1
        self._known = 0
        """Number of this driver's reports that were taken."""

        self._launches = self._validations = 0
        self._rewind: int | None = None
        self._amendments: list[tuple[int, Row]] = []
        """Number of the validation, and its metrics."""

        self._clear()

    def take(self, entry: Entry) -> None:
        """Take the journal's next entry."""
        if entry.token < max(self._token, self.position.since):
            # The run was later started over, or the entry's driver had lost its lease.
            return
        match entry:
            case Opened(token=token):
                self._token, self._known = token, 0
            case MetricsReported(rank=0) | ReportBlock(rank=0):
                self._reported(entry)
            case Launched(step=step):
                self._launched(step)
            case CheckpointCommitted(step=step, good_step=good_step):
                self._committed(step, good_step)
            case ValidationEnded():
                self._validated(entry)
            case LoadMeasured() if self._has_loads:
                self._load = _system_metrics(entry)
            case RunConcluded(succeeded=True):
                self._settled = _ALL

    @property
    def known(self) -> int:
        """Number of the last driver's reports that were taken."""
        return self._known

    @property
    def sent(self) -> int:
        """The last step that it has after the removal of rows that a restart has undone."""
        return self.position.sent if self._rewind is None else self._rewind

    @property
    def ready(self) -> int:
        """Number of missing rows that no restart undoes, or that can be removed later."""
        return max(0, _count(self._reports, self._settled) - self._start)

    def next(self, *, is_over: bool = False) -> StoreChanges:
        """Return the next changes. Call `done` after they are made.

        Args:
            is_over: whether no later row can take validations' metrics with it.
        """
        rows = self._ready()
        sent = rows[-1].step if rows else self.sent
        known = list(takewhile(lambda each: each[1].step <= sent, self._amendments))
        numbers, amendments = [number for number, _ in known], [row for _, row in known]
        if not self._can_amend:
            rows, amendments = _with_validations(rows, amendments)
            if not is_over:
                del numbers[len(numbers) - len(amendments) :]
                amendments = []
        amended = numbers[-1] if numbers else self.position.amendments
        if len(numbers) == len(self._amendments):
            amended = max(amended, self._validations)
        return StoreChanges(
            rewind=self._rewind,
            rows=rows,
            amendments=tuple(amendments),
            position=replace(
                self.position,
                sent=sent,
                launches=max(self.position.launches, self._launches),
                amendments=amended,
            ),
        )

    def done(self, changes: StoreChanges) -> None:
        """Note that changes were made."""
        self.position = changes.position
        self._rewind = None
        self._start += len(changes.rows)
        if self._start == len(self._reports):
            self._clear()
        sent = self.position.amendments
        self._amendments = [each for each in self._amendments if each[0] > sent]
        for row in changes.rows:
            self._loads.pop(row.step, None)

    def _clear(self) -> None:
        self._reports, self._times, self._start = Reports(), array("d"), 0

    def _reported(self, entry: MetricsReported | ReportBlock) -> None:
        new = new_reports(entry, self._known)
        if new is None:
            return
        self._known = new.behind
        start = max(new.start, _count(new.reports, self.sent))
        if start < len(new.reports):
            if self._load:
                self._loads[int(new.reports.steps()[start])] = self._load
                self._load = {}
            self._reports.extend(new.reports, start=start)
            self._times.extend(new.times[start:])

    def _committed(self, step: int, good_step: int | None) -> None:
        if self._is_final:
            return
        self._covering.append(step)
        for each in self._covering:
            if good_step is None or each < good_step:
                self._settled = max(self._settled, each)
        self._covering = [each for each in self._covering if each > self._settled]

    def _launched(self, step: int) -> None:
        self._launches += 1
        self._reports.drop_after(step)
        del self._times[len(self._reports) :]
        self._start = min(self._start, len(self._reports))
        self._loads = {at: load for at, load in self._loads.items() if at <= step}
        self._amendments = [each for each in self._amendments if each[1].step <= step]
        if not self._is_final:
            # Settle no more than was: divergence may undo the starting checkpoint, too.
            self._settled = min(self._settled, step)
            self._covering = [each for each in self._covering if each < step] + [step]
        if self._can_rewind and self._launches > self.position.launches:
            self._rewind = min(step, self.sent)

    def _validated(self, entry: ValidationEnded) -> None:
        self._validations += 1
        if entry.metrics and self._validations > self.position.amendments:
            row = Row(step=entry.step, time=entry.time, metrics=flat(entry.metrics))
            self._amendments.append((self._validations, row))

    def _ready(self) -> tuple[Row, ...]:
        stop = min(_count(self._reports, self._settled), self._start + _AT_ONCE)
        if stop <= self._start:
            return ()
        steps = self._reports.steps()[self._start : stop].tolist()
        times, metrics = self._times[self._start : stop], self._reports[self._start : stop]
        return tuple(
            Row(step=step, time=time, metrics={**flat(each), **self._loads.get(step, {})})
            for step, time, each in zip(steps, times, metrics, strict=True)
        )


def _with_validations(
    rows: Sequence[Row], validations: Sequence[Row]
) -> tuple[tuple[Row, ...], list[Row]]:
    """Return rows, each with the metrics of at most one validation, and the validations left."""
    left, found = deque(validations), []
    for row in rows:
        takes = left and left[0].step <= row.step and row.metrics.keys().isdisjoint(left[0].metrics)
        found.append(replace(row, validation=left.popleft()) if takes else row)
    return tuple(found), list(left)


def _system_metrics(load: LoadMeasured) -> Mapping[str, float]:
    """Return each rank's load, under names that MLflow and W&B take for system metrics."""
    busy = {
        f"system/rank_{rank}_busy_percentage": round(100 * share, 2)
        for rank, share in enumerate(load.busy)
    }
    cpu = {
        f"system/rank_{rank}_cpu_utilization_percentage": round(100 * cpus, 2)
        for rank, cpus in enumerate(load.cpu)
    }
    memory = {
        f"system/rank_{rank}_memory_megabytes": taken / 1e6
        for rank, taken in enumerate(load.memory)
    }
    gpus: dict[str, float] = {}
    for rank, its in enumerate(load.gpus):
        for number, (computed, used) in enumerate(its):
            of = f"system/rank_{rank}_gpu_{number}"
            if computed is not None:
                gpus[f"{of}_utilization_percentage"] = round(100 * computed, 2)
            if used is not None:
                gpus[f"{of}_memory_usage_megabytes"] = used / 1e6
    return {**busy, **cpu, **memory, **gpus}


def _count(reports: Reports, step: int) -> int:
    """Return the number of reports up to a step."""
    return bisect_right(reports.steps(), step)
