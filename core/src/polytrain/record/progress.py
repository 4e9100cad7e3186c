"""What a run is doing now: a fold over the lines of its journal. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from polytrain.record.entries import (
    AttemptEnded,
    CheckpointCommitted,
    DrainRequested,
    Entry,
    Launched,
    LoadMeasured,
    MetricsReported,
    Opened,
    ProcessesRequested,
    RankJoined,
    RunConcluded,
    Transitioned,
    ValidationEnded,
    ValidationRequested,
)
from polytrain.record.ledger import Ledger
from polytrain.text.metrics import named_metric

_SAMPLE_EVERY_S = 0.5
_SAMPLES = 120
"""The rate is that of the last minute; of slow steps, of the last 120."""


class Stage(StrEnum):
    """What a run waits for, or does."""

    PLACING = "waiting for workers"
    LOADING = "reading data and the checkpoint to start from"
    STARTING = "starting worker processes"
    JOINING = "ranks are joining"
    TRAINING = "training"
    ENDING_ATTEMPT = "ending the worker processes"
    LEAVING = "training is done, storing the rest"
    CONCLUDED = "ended"


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a run is doing, as of the last line of its journal that was taken.

    Moments are in seconds since the epoch.
    """

    ledger: Ledger
    """The ledger of the same lines: whoever passes a line on takes it into the ledger before."""

    stage: Stage = Stage.PLACING
    since: float = 0.0
    """When this stage began, in seconds since the epoch."""

    world_size: int = 0
    joined: int = 0
    total: int | None = None
    """The most steps of the whole run; None if that is unknown."""

    time_budget_s: float | None = None
    """Seconds of training that end the run; None if none do."""

    step: int = 0
    """Rank 0's last step, or the one that the attempt resumes from."""

    has_reported: bool = False
    """Whether rank 0 of this attempt has reported."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    committed: int | None = None
    """Step of the newest committed checkpoint; None if there is none."""

    checkpoint: str = ""
    """Name of its directory; empty if there is none."""

    best: tuple[str, float, int] | None = None
    """The metric by which checkpoints are ranked, its best value of a report or of a validation,
    and that one's step."""

    validations: int = 0
    """Validations that aren't done."""

    busy: Sequence[float] = ()
    """The share of the last window for which each rank worked, and didn't wait for others."""

    restarts: int = 0
    failed: AttemptEnded | None = None
    """The end of the last attempt that failed, also if another has started since."""

    last_failed: AttemptEnded | None = None
    """The same, if no other attempt follows."""

    is_over: bool = False
    """Whether no other attempt follows."""

    stopping: str = ""
    """Why the attempt ends after its next checkpoint; empty if it doesn't."""

    concluded: RunConcluded | None = None
    """The conclusion; None until there is one."""

    _ranking: tuple[str | None, str] = (None, "max")
    _began: tuple[float, int] = (0.0, 0)
    """Seconds of training and the highest step before this attempt."""

    _reported_at: float = 0.0
    _newest: tuple[float, int] = (0.0, 0)
    """Seconds of training and the highest step, at the last report."""

    _samples: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=_SAMPLES), repr=False
    )
    """The same at earlier reports, from the oldest one that counts."""

    def take(self, entry: Entry) -> None:
        """Take the next entry of the journal, or a report of a rank above 0, which says nothing."""
        before = self.stage
        match entry:
            case Opened():
                self._opened(entry)
            case Launched():
                self._launched(entry)
            case ProcessesRequested():
                self.stage = Stage.STARTING
            case MetricsReported(rank=0):
                self._reported(entry)
            case CheckpointCommitted(step=step):
                self.committed, self.checkpoint = step, entry.checkpoint
            case LoadMeasured(busy=busy):
                self.busy = busy
            case ValidationRequested():
                self.validations += 1
            case ValidationEnded():
                self.validations = max(0, self.validations - 1)
                self._note_best(entry.step, entry.metrics)
            case AttemptEnded():
                self.stopping = ""
                if entry.failure is not None:
                    self.failed = entry
                    self.last_failed = entry if self.is_over else None
            case RunConcluded():
                self.stage, self.concluded = Stage.CONCLUDED, entry
            case Transitioned():
                self._enter(entry)
        if self.stage is not before:
            self.since = entry.time

    @property
    def steps_per_s(self) -> float | None:
        """New steps per second of training, lately; None if there are too few."""
        if not self._samples:
            return None
        # Until there is a second report, the time to the first one has to do.
        since_s, since = self._samples[0] if len(self._samples) > 1 else self._began
        passed_s, done = self._newest[0] - since_s, self._newest[1] - since
        return done / passed_s if done > 0 and passed_s > 0 else None

    @property
    def repeats_until(self) -> int | None:
        """The step up to which this attempt repeats what an earlier one did; None if it doesn't."""
        # Reports are in the ledger before they are here.
        _, highest = self._began
        return highest if self.step < highest and self.stage is Stage.TRAINING else None

    def unreported_s(self, now: float) -> float | None:
        """Return the seconds since the last report while an attempt trains; None if it has none."""
        if self.stage is not Stage.TRAINING or not self.has_reported:
            return None
        return max(0.0, now - self._reported_at)

    def left_s(self, now: float) -> float | None:
        """Return the seconds of training that are left; None if that is unknown.

        It is unknown as well once the estimate is used up.
        """
        known = []
        steps_s = self._steps_left_s(now)
        if steps_s is not None:
            known.append(steps_s)
        if self.time_budget_s is not None:
            known.append(self.time_budget_s - self.ledger.trained_s(now))
        left_s = min(known, default=0.0)
        return left_s if left_s > 0 else None

    def is_overdue(self, now: float) -> bool:
        """Return whether there are steps left, for which the time is over by the estimate."""
        steps_s = self._steps_left_s(now)
        return steps_s is not None and steps_s <= 0 and self.step < (self.total or 0)

    def _steps_left_s(self, now: float) -> float | None:
        """Return the seconds that the steps left would take; negative once they are over."""
        rate = self.steps_per_s
        if self.total is None or rate is None:
            return None
        return max(0, self.total - self.step) / rate - (self.unreported_s(now) or 0.0)

    def _opened(self, opened: Opened) -> None:
        self.world_size = opened.world_size
        self.total, self.time_budget_s = opened.total_steps, opened.time_budget_s
        self.stage, self.since = Stage.PLACING, opened.time
        self.concluded = self.last_failed = None
        self.is_over = False
        self._ranking = opened.ranking

    def _launched(self, launched: Launched) -> None:
        self.stage, self.joined, self.world_size = Stage.LOADING, 0, launched.world_size
        self.step, self.has_reported, self.busy = launched.step, False, ()
        self.stopping = ""
        self.restarts = self.ledger.restarts
        self._began = self.ledger.seconds["train"], self.ledger.highest_step
        if launched.start is not None:
            self.committed, self.checkpoint = launched.step, PurePosixPath(launched.start).name

    def _reported(self, report: MetricsReported) -> None:
        self.step, self.metrics, self.has_reported = report.step, report.metrics, True
        self._reported_at = report.time
        self._newest = self.ledger.seconds["train"], self.ledger.highest_step
        if not self._samples or self._newest[0] - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            self._samples.append(self._newest)
        self._note_best(report.step, report.metrics)

    def _note_best(self, step: int, metrics: Mapping[str, Any]) -> None:
        name, order = self._ranking
        if name is None:
            return
        try:
            value = named_metric(metrics, name)
        except KeyError:
            return
        if not isinstance(value, int | float) or value != value:
            return
        is_better = self.best is None or (
            value > self.best[1] if order == "max" else value < self.best[1]
        )
        if is_better:
            self.best = name, value, step

    def _enter(self, entry: Transitioned) -> None:
        if isinstance(entry, DrainRequested):
            self.stopping = entry.reason
        match entry.phase:
            case "Placing":
                self.stage = Stage.PLACING
            case "Gathering" if self.stage not in (Stage.LOADING, Stage.STARTING):
                self.stage = Stage.LOADING
            case "Training":
                self.joined += isinstance(entry, RankJoined)
                is_joined = self.joined >= self.world_size
                self.stage = Stage.TRAINING if is_joined else Stage.JOINING
            case "Ending":
                self.stage = Stage.ENDING_ATTEMPT
            case "Leaving":
                self.stage = Stage.LEAVING
            case "Concluded":
                self.is_over = True
