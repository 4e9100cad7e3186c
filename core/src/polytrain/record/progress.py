"""What a run is doing now: a fold over the lines of its journal. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polytrain.record.ledger import Ledger

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure:
    """Why the last failed attempt has ended."""

    kind: str
    rank: int | None
    host: str
    """Empty if unknown."""

    step: int
    message: str
    last_lines: tuple[str, ...]
    """The end of the rank's output."""

    decision: str
    """Why there is another attempt, or not."""

    @property
    def where(self) -> str:
        """The rank and its host; empty if the failure isn't that of one rank."""
        if self.rank is None:
            return ""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a run is doing, as of the last line of its journal that was taken."""

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

    validations: int = 0
    """Validations that aren't done."""

    busy: Sequence[float] = ()
    """The share of the last window for which each rank worked, and didn't wait for others."""

    restarts: int = 0
    failure: LastFailure | None = None
    """Why the last failed attempt has failed, also if another has started since."""

    last_failure: LastFailure | None = None
    """The same, if no other attempt follows."""

    is_over: bool = False
    """Whether no other attempt follows."""

    stopping: str = ""
    """Why the attempt ends after its next checkpoint; empty if it doesn't."""

    concluded: Mapping[str, Any] | None = None
    """The line of the conclusion; None until there is one."""

    _reported_at: float = 0.0
    _newest: tuple[float, int] = (0.0, 0)
    """Seconds of training and the highest step, at the last report."""

    _samples: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=_SAMPLES), repr=False
    )
    """The same at earlier reports, from the oldest one that counts."""

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take the next line of the journal."""
        before = self.stage
        match entry["event"]:
            case "Opened":
                self._opened(entry)
            case "Launched":
                self._launched(entry)
            case "Started":
                self.stage = Stage.STARTING
            case "Reported":
                self._reported(entry)
            case "Committed":
                self.committed = entry["step"]
            case "DrainWanted":
                self.stopping = entry["reason"]
            case "Load":
                self.busy = entry["busy"]
            case "ValidationRequested":
                self.validations += 1
            case "ValidationEnded":
                self.validations = max(0, self.validations - 1)
            case "AttemptEnded":
                self.stopping = ""
                self._attempt_ended(entry["failure"], entry["reason"])
            case "Concluded":
                self.stage, self.concluded = Stage.CONCLUDED, entry
        if "phase" in entry:
            self._enter(entry)
        if self.stage is not before:
            self.since = entry["time"]

    @property
    def steps_per_s(self) -> float | None:
        """New steps per second of training, lately; None if there are too few."""
        if not self._samples:
            return None
        passed_s = self._newest[0] - self._samples[0][0]
        done = self._newest[1] - self._samples[0][1]
        return done / passed_s if done > 0 and passed_s > 0 else None

    @property
    def repeats_until(self) -> int | None:
        """The step up to which this attempt repeats what an earlier one did; None if it doesn't."""
        highest = self.ledger.highest_step
        return highest if self.step < highest and self.stage is Stage.TRAINING else None

    def left_s(self, now: float) -> float | None:
        """Return the seconds of training that are left; None if that is unknown.

        Args:
            now: seconds since the epoch.
        """
        known = []
        rate = self.steps_per_s
        if self.total is not None and rate is not None:
            is_working = self.stage is Stage.TRAINING and self.has_reported
            since_s = max(0.0, now - self._reported_at) if is_working else 0.0
            known.append(max(0, self.total - self.step) / rate - since_s)
        if self.time_budget_s is not None:
            known.append(self.time_budget_s - self.ledger.trained_s(now))
        return max(0.0, min(known)) if known else None

    def _opened(self, entry: Mapping[str, Any]) -> None:
        self.world_size = entry["world_size"]
        self.total, self.time_budget_s = entry.get("total_steps"), entry.get("time_budget_s")
        self.stage, self.since = Stage.PLACING, entry["time"]
        self.concluded = self.last_failure = None
        self.is_over = False

    def _launched(self, entry: Mapping[str, Any]) -> None:
        self.stage, self.joined, self.world_size = Stage.LOADING, 0, entry["world_size"]
        self.step, self.has_reported, self.busy = entry["step"], False, ()
        self.stopping = ""
        self.restarts = self.ledger.restarts
        if entry["start"] is not None:
            self.committed = entry["step"]

    def _reported(self, entry: Mapping[str, Any]) -> None:
        self.step, self.metrics, self.has_reported = entry["step"], entry["metrics"], True
        self._reported_at = entry["time"]
        self._newest = self.ledger.seconds["train"], self.ledger.highest_step
        if not self._samples or self._newest[0] - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            self._samples.append(self._newest)

    def _attempt_ended(self, failure: Mapping[str, Any] | None, reason: str) -> None:
        if failure is not None:
            self.failure = LastFailure(
                kind=failure["kind"],
                rank=failure["rank"],
                host=failure.get("host", ""),
                step=failure["step"],
                message=failure["message"],
                last_lines=tuple(failure.get("last_lines", ())),
                decision=reason,
            )
            self.last_failure = self.failure if self.is_over else None

    def _enter(self, entry: Mapping[str, Any]) -> None:
        match entry["phase"]:
            case "Placing":
                self.stage = Stage.PLACING
            case "Gathering" if self.stage not in (Stage.LOADING, Stage.STARTING):
                self.stage = Stage.LOADING
            case "Training":
                self.joined += entry["event"] == "Joined"
                is_joined = self.joined >= self.world_size
                self.stage = Stage.TRAINING if is_joined else Stage.JOINING
            case "Ending":
                self.stage = Stage.ENDING_ATTEMPT
            case "Leaving":
                self.stage = Stage.LEAVING
            case "Concluded":
                self.is_over = True
