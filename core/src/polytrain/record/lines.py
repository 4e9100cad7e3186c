"""Many entries as one line of a journal: reports in columns, and windows of load as means. Pure."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from polytrain.record.entries import LoadMeasured, MetricsReported, ReportBlock, encoded
from polytrain.record.reports import Reports, decoded_numbers, encoded_numbers
from polytrain.storage.typed_json import Count, Duration, Seconds, fitting
from polytrain.text import strict_json
from polytrain.text.described import numbered

logger = logging.getLogger(__name__)

_FEW = 16
"""Reports that take less room as lines of their own."""


class DraftReports:
    """Reports of one rank that aren't in the journal for good."""

    def __init__(self, first: int = 0, *, rank: int = 0) -> None:
        self._first = first
        self._rank = rank
        self._lines: list[str] = []
        self._reports = Reports()
        self._times = array("d")
        self._stalled: list[tuple[int, float]] = []
        """Position and value, where it has changed."""

        self._copied: list[tuple[int, float]] = []
        """The same of the time for copies."""

    @property
    def written(self) -> int:
        """Number of this driver's reports, these included."""
        return self._first + len(self._lines)

    def add(self, entry: MetricsReported, line: str) -> None:
        """Add a report, with its line."""
        if entry.stalled_s != (self._stalled[-1][1] if self._stalled else 0.0):
            self._stalled.append((len(self), entry.stalled_s))
        if entry.copied_s != (self._copied[-1][1] if self._copied else 0.0):
            self._copied.append((len(self), entry.copied_s))
        self._lines.append(line)
        self._times.append(entry.time)
        self._reports.add(entry.step, entry.metrics)

    def text(self, token: int) -> str:
        """Return them as lines."""
        if len(self) < _FEW:
            return "".join(self._lines)
        block = ReportBlock(
            time=self._times[-1],
            token=token,
            rank=self._rank,
            n=self._first,
            times=encoded_numbers(self._times),
            stalled_s=self._stalled or None,
            copied_s=self._copied or None,
            **self._reports.to_json(),
        )
        return strict_json.dumps(encoded(block)) + "\n"

    def __len__(self) -> int:
        return len(self._lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewReports:
    """The reports of one rank in one line of a journal."""

    reports: Reports
    times: Sequence[float]
    """When each was taken, in seconds since the epoch."""

    stalled_s: Mapping[int, float] = field(default_factory=dict)
    """Position → rank 0's stall so far, where it isn't that of the report before."""

    copied_s: Mapping[int, float] = field(default_factory=dict)
    """The same of the time for copies."""

    start: int
    """The first that isn't known yet."""

    behind: int
    """How many reports of their driver are known with these."""


def new_reports(entry: MetricsReported | ReportBlock, known: int) -> NewReports | None:
    """Return the reports in an entry; None if there are no new ones, or if they are damaged.

    A driver that dies may have written them as drafts and for good.

    Args:
        known: how many reports of its driver and rank are known.
    """
    if isinstance(entry, MetricsReported):
        if entry.n < known:
            return None
        reports = Reports()
        reports.add(entry.step, entry.metrics)
        return NewReports(
            reports=reports,
            times=(entry.time,),
            stalled_s={0: entry.stalled_s} if entry.stalled_s else {},
            copied_s={0: entry.copied_s} if entry.copied_s else {},
            start=0,
            behind=entry.n + 1,
        )
    behind = entry.n + entry.count
    if behind <= known:
        return None
    try:
        times = _times(entry)
        stalled_s = _changes(entry.stalled_s, len(times), file="stalled_s")
        copied_s = _changes(entry.copied_s, len(times), file="copied_s")
        reports = Reports.from_json(
            {"count": entry.count, "steps": entry.steps, "columns": entry.columns}
        )
    except (KeyError, ValueError) as error:
        logger.warning(
            "%s damaged in the journal: %s", numbered(behind - known, "report", "are"), error
        )
        return None
    start = max(0, known - entry.n)
    return NewReports(
        reports=reports,
        times=times,
        stalled_s=stalled_s,
        copied_s=copied_s,
        start=start,
        behind=behind,
    )


def _changes(stored: object, count: int, *, file: str) -> dict[int, float]:
    """Return position → value of what changes now and then among this many reports."""
    found = dict(fitting(list[tuple[Count, Duration]], stored or [], file=file))
    if list(found) != sorted(found) or max(found, default=0) >= count:
        raise ValueError("a stall of no report")
    return found


def _times(block: ReportBlock) -> Sequence[float]:
    """Return when the reports in one line were made: as many as it counts, so it can't make more
    reports than it has bytes for."""
    times = decoded_numbers(fitting(str, block.times, file="times"), "d")
    fitting(list[Seconds], times.tolist(), file="times")
    if len(times) != block.count or not len(times):
        raise ValueError(f"{len(times)} times for {block.count} reports")
    return times


_BYTES_PER_S = 12.0
"""What these lines may add to a journal: 1 MB a day."""

_BYTES_PER_RANK = 24
"""A share, the CPUs and the bytes of a process's memory, as JSON."""

_BYTES_PER_GPU = 24
"""A share and the bytes of its memory."""


@dataclass(slots=True)
class _GpuSum:
    """What is known of a GPU in several windows."""

    busy: float = 0.0
    windows: int = 0
    memory: int | None = None

    def add(self, busy: float | None, memory: int | None) -> None:
        if busy is not None:
            self.busy += busy
            self.windows += 1
        if memory is not None:
            self.memory = max(memory, self.memory or 0)

    @property
    def use(self) -> tuple[float | None, int | None]:
        return (round(self.busy / self.windows, 2) if self.windows else None), self.memory


@dataclass(slots=True)
class LoadLines:
    """The windows of an attempt that no line has yet."""

    _due: float = 0.0
    """When the next line may be written, in seconds."""

    _windows: int = 0
    _newest: LoadMeasured | None = None
    _busy: list[float] = field(default_factory=list)
    """Each rank's sum over the windows."""

    _cpu: list[float] = field(default_factory=list)
    """The same of the CPUs."""

    _memory: list[int] = field(default_factory=list)
    """The most of each rank."""

    _gpus: list[list[_GpuSum]] = field(default_factory=list)
    """Each rank's GPUs; empty until something of one is known."""

    def add(self, window: LoadMeasured) -> LoadMeasured | None:
        """Add a window of all ranks; return an entry for the journal if one is due."""
        if not self._windows:
            self._busy, self._memory = [0.0] * len(window.busy), [0] * len(window.memory)
            self._cpu, self._gpus = [0.0] * len(window.cpu), []
        self._windows += 1
        self._newest = window
        self._busy = [sum(pair) for pair in zip(self._busy, window.busy, strict=True)]
        self._cpu = [sum(pair) for pair in zip(self._cpu, window.cpu, strict=True)]
        self._memory = [max(pair) for pair in zip(self._memory, window.memory, strict=True)]
        self._add_gpus(window)
        if window.time < self._due:
            return None
        gpus = sum(map(len, self._gpus))
        size = len(window.busy) * _BYTES_PER_RANK + gpus * _BYTES_PER_GPU
        self._due = window.time + size / _BYTES_PER_S
        return self.rest()

    def rest(self) -> LoadMeasured | None:
        """Return an entry with the windows that are left; None if none are.

        It has the number of windows, and in them each rank's mean share, mean CPUs, most memory,
        and the same of its GPUs.
        """
        if self._newest is None or not self._windows:
            return None
        entry = replace(
            self._newest,
            windows=self._windows,
            busy=[round(share / self._windows, 2) for share in self._busy],
            cpu=tuple(round(cpus / self._windows, 2) for cpus in self._cpu),
            memory=tuple(self._memory),
            gpus=tuple([each.use for each in its] for its in self._gpus),
        )
        self._windows = 0
        return entry

    def _add_gpus(self, window: LoadMeasured) -> None:
        # A rank's GPUs may be unknown in some windows: the driver was late, or failed.
        if window.gpus and not self._gpus:
            self._gpus = [[] for _ in window.busy]
        for sums, its in zip(self._gpus, window.gpus, strict=False):
            sums.extend(_GpuSum() for _ in its[len(sums) :])
            for each, (busy, memory) in zip(sums, its, strict=False):
                each.add(busy, memory)
