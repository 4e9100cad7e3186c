"""Where a run's time went: a fold over the lines of its journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polytrain.record.entries import (
    Closed,
    Entry,
    Launched,
    MetricsReported,
    Opened,
    ProcessesRequested,
    RankJoined,
    RunConcluded,
    Transitioned,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ACCOUNTS = (
    "start",
    "data_load",
    "import",
    "rendezvous",
    "train",
    "checkpoint_stall",
    "snapshot",
    "detect",
    "teardown",
    "reschedule",
    "data_reload",
    "replayed_work",
    "ending",
)
"""The accounts of time, in the order of the report. Every moment belongs to one of them."""

_WORK = ("train", "replayed_work")
_WAITS = ("checkpoint_stall", "snapshot")
_TRAINING = (*_WORK, *_WAITS)


@dataclass(slots=True)
class Ledger:
    """The time of a run, over all its drivers. Moments are in seconds since the epoch.

    The time between two drivers doesn't count; a killed driver counts until its last line.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    """Account → seconds:

    - `start`: from the call of `fit()` until its first worker processes are requested.
    - `data_load`: agents read the rows that they hold. Rows that workers read themselves count as
      `train`.
    - `import`: from the request for a process until the slowest rank can meet the others.
    - `rendezvous`: from there until the last rank has joined the collective.
    - `train`: from there until every rank is done, or one has failed.
    - `checkpoint_stall`: rank 0's training waits for a checkpoint: for its files to be written, for
      room in the upload queue, or for its commit.
    - `snapshot`: rank 0's training waits for a copy of its state in memory.
    - `detect`: a rank has failed, and the run hasn't noticed yet; for a hang, the time without
      progress. For a lost agent or node this time is unknown, and counts as `train`.
    - `teardown`: from the notice of a failure, or the last checkpoint before a planned restart,
      until all processes are gone and their staged checkpoints are stored.
    - `reschedule`: the pool acquires agents, and the starting point is chosen.
    - `data_reload`: as `data_load`, in later attempts, where only new agents read rows, and until
      the checkpoint to resume from is on the nodes.
    - `replayed_work`: training repeats steps that rank 0 had reported before.
    - `ending`: from the end of training until all resources are released.
    """

    lost_steps: int = 0
    """Reported steps of rank 0 that were lost, over all attempts."""

    launches: int = 0
    """Number of attempts."""

    last_report: float | None = None
    """When rank 0 reported last, in seconds since the epoch; None if it hasn't."""

    _account: str | None = field(default=None, repr=False)
    """The current account; None while no driver lives."""

    _now: float = field(default=0.0, repr=False)
    _phase: tuple[str, int] | None = field(default=None, repr=False)
    _is_first: bool = field(default=True, repr=False)
    """Whether this driver hasn't launched an attempt yet."""

    _world_size: int = field(default=0, repr=False)
    _joined: int = field(default=0, repr=False)
    _step: int = field(default=0, repr=False)
    _highest_step: int = field(default=0, repr=False)
    _spent: dict[str, float] = field(default_factory=dict, repr=False)
    """This attempt's booked time, which may still move to another account."""

    _waited_s: dict[str, float] = field(default_factory=dict, repr=False)
    """Account → rank 0's reported wait in this attempt."""

    _detected_s: float = field(default=0.0, repr=False)
    _failed: tuple[float, str] | None = field(default=None, repr=False)
    """When this attempt's work ended, and its account until then."""

    @property
    def wall_s(self) -> float:
        """The total time."""
        return sum(self.seconds.values())

    def trained_s(self, now: float | None = None) -> float:
        """Seconds in which workers trained, repeated steps or waited for checkpoints.

        Args:
            now: seconds since the epoch; the time of the last line if omitted.
        """
        trains = self._account in _TRAINING
        since = max(0.0, now - self._now) if trains and now is not None else 0.0
        return sum(self.seconds[account] for account in _TRAINING) + since

    def elapsed_s(self, now: float) -> float:
        """Return the total time until a moment."""
        return self.wall_s + (max(0.0, now - self._now) if self._account is not None else 0.0)

    @property
    def goodput(self) -> float:
        """The fraction of time with new training progress, between 0 and 1."""
        wall_s = self.wall_s
        return self.seconds["train"] / wall_s if wall_s else 0.0

    @property
    def highest_step(self) -> int:
        """The highest step that rank 0 has reported."""
        return self._highest_step

    @property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, self.launches - 1)

    def count_until(self, now: float) -> None:
        """Count time without lines: the driver lives, and does what it did at its last line."""
        if now > self._now:
            self._book(now)

    def take(self, entry: Entry) -> None:
        """Take the next entry of the journal, but no report of a rank above 0."""
        if isinstance(entry, MetricsReported):
            self._book(entry.time)
            self._reported(entry.step)
            self._waited(entry.stalled_s, entry.copied_s)
            return
        if isinstance(entry, Opened):
            # The end of a killed driver is unknown.
            self._begin(entry.time if entry.began is None else entry.began)
        self._book(entry.time)
        if isinstance(entry, Transitioned):
            self._enter(entry.phase, entry.attempt)
        match entry:
            case Launched():
                self._launched(entry.step, entry.world_size)
            case ProcessesRequested() if self._account in ("data_load", "data_reload"):
                self._account = "import"
            case RankJoined():
                self._joined += 1
                if self._joined == self._world_size and self._account == "rendezvous":
                    self._account = _WORK[self._step < self._highest_step]
            case RunConcluded():
                self._account = "ending"
            case Closed():
                self._account = None
        if isinstance(entry, Transitioned):
            self._waited(entry.stalled_s, entry.copied_s)
            if entry.since_s and self._failed is not None:
                self._detected(entry.since_s)

    def take_reports(
        self,
        times: Sequence[float],
        steps: npt.NDArray[np.int64],
        stalled_s: Mapping[int, float],
        copied_s: Mapping[int, float],
        *,
        start: int = 0,
    ) -> None:
        """Take many reports that follow one another, as `take` would take their lines.

        Args:
            times: when each was made, in seconds since the epoch.
            steps: the step of each.
            stalled_s: position → rank 0's stall so far, where it isn't that of the report before.
            copied_s: the same of the time for copies.
            start: the first report to take.
        """
        begin = start
        for row in sorted({*stalled_s, *copied_s}):
            if row >= start:
                self._take_alike(times[begin:row], steps[begin:row])
                self._book(times[row])
                self._reported(int(steps[row]))
                self._waited(stalled_s.get(row, 0.0), copied_s.get(row, 0.0))
                begin = row + 1
        self._take_alike(times[begin:], steps[begin:])

    def __str__(self) -> str:
        wall_s = self.wall_s
        width = max(map(len, ACCOUNTS))
        rows = [*self.seconds.items(), ("wall time", wall_s)]
        lines = [
            f"{name:<{width}}  {spent:10.2f} s  {100 * spent / wall_s if wall_s else 0.0:5.1f} %"
            for name, spent in rows
        ]
        return "\n".join(
            [
                *lines,
                f"{'goodput':<{width}}  {'':12}  {100 * self.goodput:5.1f} %",
                f"{'lost steps':<{width}}  {self.lost_steps:7d}",
                f"{'restarts':<{width}}  {self.restarts:7d}",
            ]
        )

    def _begin(self, began: float) -> None:
        self._account, self._now = "start", began
        self._is_first, self._phase = True, None
        self._spent.clear()
        self._failed = None

    def _book(self, now: float) -> None:
        # Clocks may be set back.
        passed, self._now = max(0.0, now - self._now), now
        if self._account is not None:
            self.seconds[self._account] += passed
            self._spent[self._account] = self._spent.get(self._account, 0.0) + passed

    def _book_each(self, passed: npt.NDArray[np.float64]) -> None:
        """Book several lengths of time, one after another: in seconds."""
        import numpy as np

        account = self._account
        if account is not None:
            for booked in (self.seconds, self._spent):
                # A running total rounds as `_book` does; a sum of all is another number.
                total = np.cumsum(np.concatenate([[booked.get(account, 0.0)], passed]))
                booked[account] = float(total[-1])

    def _enter(self, phase: str, attempt: int) -> None:
        before, self._phase = self._phase, (phase, attempt)
        if self._phase == before or self._account is None:
            return
        if before is not None and before[0] in ("Gathering", "Training"):
            is_next = phase == "Training" or (phase == "Leaving" and before[1] == attempt)
            if not is_next:
                self._failed = self._now, self._account
        match phase:
            case "Placing" | "Gathering":
                self._account = "start" if self._is_first else "reschedule"
            case "Training":
                self._account = "rendezvous"
            case "Ending":
                self._account = "teardown"
            case _:
                self._account = "ending"

    def _launched(self, step: int, world_size: int) -> None:
        self._account = "data_reload" if self.launches else "data_load"
        self._is_first = False
        self.launches += 1
        self.lost_steps += max(0, self._step - step)
        self._step, self._world_size, self._joined = step, world_size, 0
        self._spent.clear()
        self._waited_s.clear()
        self._detected_s = 0.0
        self._failed = None

    def _reported(self, step: int) -> None:
        self._step, self.last_report = step, self._now
        if self._account == "replayed_work" and step >= self._highest_step:
            self._account = "train"
        self._highest_step = max(self._highest_step, step)

    def _take_alike(self, times: Sequence[float], steps: npt.NDArray[np.int64]) -> None:
        """Take reports that say nothing of a stall."""
        if not len(times):
            return
        # Importing numpy takes a while, and only a resumed run takes many reports.
        import numpy as np

        passed = np.maximum(0.0, np.diff(times, prepend=self._now))
        new = np.flatnonzero(steps >= self._highest_step)
        # The first report of a new step ends the replay.
        behind = int(new[0]) + 1 if len(new) else len(steps)
        for row, some in ((behind - 1, passed[:behind]), (len(steps) - 1, passed[behind:])):
            if len(some):
                self._book_each(some)
                self._now = float(times[row])
                self._reported(int(steps[row]))
        self._highest_step = max(self._highest_step, int(steps.max()))

    def _waited(self, *so_far_s: float) -> None:
        """Book rank 0's waits in this attempt, one for each account in `_WAITS`."""
        work = _WORK[::-1] if self._account == "replayed_work" else _WORK
        for account, total_s in zip(_WAITS, so_far_s, strict=True):
            known_s = self._waited_s.get(account, 0.0)
            if total_s > known_s:
                self._waited_s[account] = total_s
                self._move(total_s - known_s, work, account)

    def _detected(self, since_s: float) -> None:
        """Book the time between a failure and its detection."""
        assert self._failed is not None
        known_at, account = self._failed
        more = known_at - (self._now - since_s) - self._detected_s
        self._detected_s += max(0.0, more)
        sources = dict.fromkeys((account, *_WORK, *_WAITS, "rendezvous", "import"))
        self._move(more, tuple(sources), "detect")

    def _move(self, seconds: float, sources: tuple[str, ...], to: str) -> None:
        """Move booked time of this attempt to another account, at most as much as there is."""
        for account in sources:
            moved = max(0.0, min(seconds, self._spent.get(account, 0.0), self.seconds[account]))
            if moved and account != to:
                seconds -= moved
                self._move_from(account, moved, to)

    def _move_from(self, account: str, seconds: float, to: str) -> None:
        self._spent[account] -= seconds
        self.seconds[account] -= seconds
        self.seconds[to] += seconds
        self._spent[to] = self._spent.get(to, 0.0) + seconds
