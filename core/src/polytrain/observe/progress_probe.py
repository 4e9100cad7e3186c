"""An agent's periodic looks at its worker process: is it making progress, working or stopped?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from polytrain.events.health import HealthEvent, WorkerStatus
from polytrain.linux.processes import cpu_seconds, is_stopped, is_traced
from polytrain.linux.progress_page import Page, WorkerStage
from polytrain.policy.hang_policy import stop_limit_s

_MAX_PERIOD_S = 1.0

_IDLE_SHARE = 0.005
"""Share of a core that a framework's background threads use while it waits."""

_IDLE_SLACK_S = 0.05
"""The kernel counts CPU time in hundredths of a second for each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The state of a process in the kernel."""

    cpu_s: float
    """CPU time of the process and its descendants since its start."""

    is_stopped: bool
    is_traced: bool

    @classmethod
    def of(cls, pid: int) -> Condition:
        """The condition of a running process."""
        return cls(cpu_s=cpu_seconds(pid), is_stopped=is_stopped(pid), is_traced=is_traced(pid))


class ProgressProbe:
    """Adds up what is seen of one worker process. Pure: the caller has the clock and looks."""

    def __init__(self, *, attempt: int, rank: int, timeout_s: float, now: float) -> None:
        """
        Args:
            attempt: the worker process's.
            rank: the worker process's.
            timeout_s: seconds without progress that matter.
            now: time of the first look, in seconds.
        """
        self.period_s = min(_MAX_PERIOD_S, timeout_s / 4)
        self._attempt = attempt
        self._rank = rank
        self._timeout_s = timeout_s
        self._looked = now
        self._beats = -1
        self._quiet_s = 0.0
        self._idle_s = 0.0
        self._idle_cpu_s = 0.0
        self._stopped_s = 0.0
        self._cpu_before: float | None = None
        self._cpu_s = 0.0
        self._reported = self._levels(WorkerStage.TRAINING)

    def look_at(self, now: float, page: Page, pid: int) -> WorkerStatus | None:
        """Look at a running worker process once more."""
        return self.look(
            now, beats=page.beats, stage=page.stage, condition=lambda: Condition.of(pid)
        )

    def look(
        self, now: float, *, beats: int, stage: WorkerStage, condition: Callable[[], Condition]
    ) -> WorkerStatus | None:
        """Look once more, and return the status if it has changed noticeably.

        Args:
            now: the time.
            beats: how often the worker process has made progress by now.
            stage: its stage.
            condition: asks the kernel. Called only if there has been no progress.
        """
        # If the whole machine stood still, the time without a look doesn't count.
        passed, self._looked = min(now - self._looked, 2 * self.period_s), now
        if beats != self._beats:
            self._beats = beats
            self._quiet_s = self._idle_s = self._idle_cpu_s = 0.0
            self._stopped_s = self._cpu_s = 0.0
            self._cpu_before = None
        else:
            self._add(passed, condition())
        levels = self._levels(stage)
        if levels == self._reported:
            return None
        self._reported = levels
        return WorkerStatus(
            attempt=self._attempt,
            rank=self._rank,
            stage=stage,
            quiet_s=self._quiet_s,
            idle_s=self._idle_s,
            stopped_s=self._stopped_s,
            cpu_s=self._cpu_s,
        )

    def _add(self, passed: float, condition: Condition) -> None:
        self._quiet_s += passed
        self._stopped_s = self._stopped_s + passed if condition.is_stopped else 0.0
        before, self._cpu_before = self._cpu_before, condition.cpu_s
        if before is None:
            # This is the first look at its CPU time since it made progress.
            return
        # It may decrease: an orphaned descendant now belongs to a different process.
        spent = condition.cpu_s - before
        self._cpu_s += max(0.0, spent)
        self._idle_s += passed
        self._idle_cpu_s += spent
        allowed = _IDLE_SLACK_S + _IDLE_SHARE * self._idle_s
        if spent < 0 or self._idle_cpu_s > allowed or condition.is_traced:
            self._idle_s = self._idle_cpu_s = 0.0

    def _levels(self, stage: WorkerStage) -> tuple[int, int, bool, bool]:
        """The values whose changes are reported."""
        quiet = _level(self._quiet_s, self._timeout_s)
        return (
            quiet,
            _level(self._idle_s, self._timeout_s),
            self._stopped_s >= stop_limit_s(self._timeout_s),
            quiet > 0 and stage.is_wait,
        )


def _level(seconds: float, timeout_s: float) -> int:
    """In halves of the time-out: 0, 1 or 2."""
    return min(2, int(2 * seconds / timeout_s))


class Probe(Protocol):
    """Adds up what is seen of a worker process."""

    period_s: float
    """Seconds between two looks."""

    def look_at(self, now: float, page: Page, pid: int) -> HealthEvent | None:
        """Look once more, and return an event if there is one."""


class Watch:
    """Looks at a running worker process from time to time, until it is closed."""

    def __init__(
        self, looker: Probe, *, page: Page, pid: int, tell: Callable[[HealthEvent], None]
    ) -> None:
        """
        Args:
            looker: adds up what is seen.
            page: of the worker process.
            pid: of the worker process.
            tell: gets the events.
        """
        self._looker = looker
        self._page = page
        self._pid = pid
        self._tell = tell
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._look)

    def pause(self) -> None:
        """Stop looking until `resume` is called."""
        self._next.cancel()

    def resume(self) -> None:
        """Look at once, and from time to time again, unless the watch is closed."""
        if not self._is_closed:
            self._next.cancel()
            self._look()

    def close(self) -> None:
        """Stop looking for good."""
        self._is_closed = True
        self._next.cancel()

    def _look(self) -> None:
        event = self._looker.look_at(self._loop.time(), self._page, self._pid)
        if event is not None:
            self._tell(event)
        self._next = self._loop.call_later(self._looker.period_s, self._look)
