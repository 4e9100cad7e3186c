"""Where a run's time went: a fold over the lines of its journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ACCOUNTS = (
    "start",
    "data_load",
    "import",
    "rendezvous",
    "train",
    "checkpoint_stall",
    "detect",
    "teardown",
    "reschedule",
    "data_reload",
    "replayed_work",
    "ending",
)
"""What time is spent on, in the order in which it is told. At any moment it is one of them."""

_WORK = ("train", "replayed_work")


@dataclass(slots=True)
class Ledger:
    """The time of a run, second by second, of all the drivers that have worked on it.

    The time between two drivers isn't in it; a driver that was killed counts until its last line.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    """Account → seconds:

    - `start`: from the call of `fit()` until its first worker processes are asked for.
    - `data_load`: agents read the rows that they hold. What workers read by themselves, while they
      train, is theirs.
    - `import`: from the request for a process until the slowest rank can meet the others.
    - `rendezvous`: from there until the last rank has joined the collective.
    - `train`: from there until every rank is done, or one has failed.
    - `checkpoint_stall`: rank 0's training stood still for a checkpoint: for its files to be made,
      for room in the queue of those on their way, for its commit where that is waited for.
    - `detect`: a rank had failed, and the run didn't know. Of a hang that is the time without
      progress. How long ago an agent or a node was lost, nobody knows: that is in `train`.
    - `teardown`: from the news of a failure, or the last checkpoint before a planned restart, until
      all processes are gone, and all that they had handed over is stored.
    - `reschedule`: agents for the next attempt are found, and what it resumes from.
    - `data_reload`: as `data_load`, in later attempts, where only new agents have anything to read,
      and until the checkpoint to resume from is on the nodes.
    - `replayed_work`: training that only repeats steps which rank 0 had reported before.
    - `ending`: every rank is done, or the run has ended otherwise: until all is released.
    """

    lost_steps: int = 0
    """Steps that rank 0 had reported and that were gone with an attempt: the sum over all."""

    launches: int = 0
    """Attempts."""

    _account: str | None = field(default=None, repr=False)
    """What the time is spent on now; None while no driver lives."""

    _now: float = field(default=0.0, repr=False)
    _phase: tuple[str, int] | None = field(default=None, repr=False)
    """Phase and attempt of the state machine."""

    _is_first: bool = field(default=True, repr=False)
    """Whether this driver has launched nothing yet."""

    _world_size: int = field(default=0, repr=False)
    _joined: int = field(default=0, repr=False)
    _step: int = field(default=0, repr=False)
    """Rank 0's."""

    _highest_step: int = field(default=0, repr=False)
    """The highest that rank 0 has ever reported."""

    _spent: dict[str, float] = field(default_factory=dict, repr=False)
    """What is booked of this attempt's time, and may still turn out to be something else."""

    _stalled_s: float = field(default=0.0, repr=False)
    """Of this attempt, as rank 0 has told it."""

    _detected_s: float = field(default=0.0, repr=False)
    _failed: tuple[float, str] | None = field(default=None, repr=False)
    """When this attempt's work was over, and what it had been."""

    @property
    def wall_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The part of the time that has brought the training forward, between 0 and 1."""
        wall_s = self.wall_s
        return self.seconds["train"] / wall_s if wall_s else 0.0

    @property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, self.launches - 1)

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take the next line of the journal."""
        if entry["event"] == "Opened":
            # Nobody knows when the driver before has ended, if it didn't say so.
            self._begin(entry.get("began", entry["time"]))
        self._book(entry["time"])
        if "phase" in entry:
            self._enter(entry["phase"], entry["attempt"])
        match entry["event"]:
            case "Launched":
                self._launched(entry["step"], entry["world_size"])
            case "Started" if self._account in ("data_load", "data_reload"):
                self._account = "import"
            case "Joined":
                self._joined += 1
                if self._joined == self._world_size and self._account == "rendezvous":
                    self._account = _WORK[self._step < self._highest_step]
            case "Reported":
                self._reported(entry["step"])
            case "Concluded":
                self._account = "ending"
            case "Closed":
                self._account = None
        if "stalled_s" in entry:
            self._stalled(entry["stalled_s"])
        if "since_s" in entry and self._failed is not None:
            self._detected(entry["since_s"])

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
        # Clocks are set back at times.
        passed, self._now = max(0.0, now - self._now), now
        if self._account is not None:
            self.seconds[self._account] += passed
            self._spent[self._account] = self._spent.get(self._account, 0.0) + passed

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
        self._stalled_s = self._detected_s = 0.0
        self._failed = None

    def _reported(self, step: int) -> None:
        self._step = step
        if self._account == "replayed_work" and step >= self._highest_step:
            self._account = "train"
        self._highest_step = max(self._highest_step, step)

    def _stalled(self, stalled_s: float) -> None:
        more, self._stalled_s = stalled_s - self._stalled_s, max(stalled_s, self._stalled_s)
        work = _WORK[::-1] if self._account == "replayed_work" else _WORK
        self._move(more, work, "checkpoint_stall")

    def _detected(self, since_s: float) -> None:
        """Something was wrong for this long when the line was written."""
        assert self._failed is not None
        known_at, account = self._failed
        more = known_at - (self._now - since_s) - self._detected_s
        self._detected_s += max(0.0, more)
        sources = dict.fromkeys((account, *_WORK, "checkpoint_stall", "rendezvous", "import"))
        self._move(more, tuple(sources), "detect")

    def _move(self, seconds: float, sources: tuple[str, ...], to: str) -> None:
        """Book time of this attempt on another account: as much of it as there is."""
        for account in sources:
            moved = max(0.0, min(seconds, self._spent.get(account, 0.0), self.seconds[account]))
            if moved and account != to:
                seconds -= moved
                self._spent[account] -= moved
                self.seconds[account] -= moved
                self.seconds[to] += moved
                self._spent[to] = self._spent.get(to, 0.0) + moved
