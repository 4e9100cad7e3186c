"""An agent's periodic checks of its worker process.

Is it making progress, working or stopped? And how busy is it, or does it wait for others?
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from polytrain.events.attempt import HealthEvent, Load, WorkerStatus
from polytrain.linux.nvidia_gpus import GpuMeter
from polytrain.linux.processes import (
    busy_seconds,
    cpu_seconds,
    is_held,
    is_stopped,
    is_traced,
    process_cpu_seconds,
    resident_bytes,
)
from polytrain.linux.progress_page import Page, WorkerStage
from polytrain.policy.hangs import stop_limit_s

logger = logging.getLogger(__name__)

_MAX_PERIOD_S = 1.0

_IDLE_SHARE = 0.005
"""Share of a core that a framework's background threads use while it waits."""

_IDLE_SLACK_S = 0.05
"""Tolerance in seconds: the kernel counts each process's CPU time in hundredths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The state of a process in the kernel."""

    cpu_s: float
    """CPU seconds of the process and its descendants since its start."""

    is_stopped: bool
    is_traced: bool

    @classmethod
    def of(cls, pid: int) -> Condition:
        """Return the condition of a running process."""
        return cls(cpu_s=cpu_seconds(pid), is_stopped=is_stopped(pid), is_traced=is_traced(pid))


class ProgressProbe:
    """Sums up samples of one worker process. Pure except `look_at`: the caller has the clock."""

    def __init__(self, *, attempt: int, rank: int, timeout_s: float, now: float) -> None:
        """
        Args:
            timeout_s: seconds without progress that count as a hang.
            now: time of the first sample, in seconds.
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
        """Sample a running worker process."""
        return self.look(
            now, beats=page.beats, stage=page.stage, condition=lambda: Condition.of(pid)
        )

    def look(
        self, now: float, *, beats: int, stage: WorkerStage, condition: Callable[[], Condition]
    ) -> WorkerStatus | None:
        """Add a sample, and return the status if it has changed noticeably.

        Args:
            now: time in seconds.
            beats: count of the worker process's progress so far.
            condition: queries the kernel; called only if there has been no progress.
        """
        # If the whole machine was suspended, the time without a sample doesn't count.
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
            # This is the first sample of its CPU time since it made progress.
            return
        # The CPU time may decrease: an orphaned descendant now has another parent.
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
    """Return the seconds in halves of the timeout: 0, 1 or 2."""
    return min(2, int(2 * seconds / timeout_s))


class Probe(Protocol):
    """Sums up samples of a worker process."""

    period_s: float
    """Seconds between two samples."""

    def look_at(self, now: float, page: Page, pid: int) -> HealthEvent | None:
        """Sample the process, and return an event if there is one."""


class PeriodicProbe:
    """Samples a running worker process periodically, until it is closed."""

    def __init__(
        self, looker: Probe, *, page: Page, pid: int, tell: Callable[[HealthEvent], None]
    ) -> None:
        """
        Args:
            tell: called with each event.
        """
        self._looker = looker
        self._page = page
        self._pid = pid
        self._tell = tell
        self._is_closed = False
        self._has_failed = False
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._look)

    def pause(self) -> None:
        """Stop sampling until `resume` is called."""
        self._next.cancel()

    def resume(self) -> None:
        """Sample at once, and periodically again, unless the watch is closed."""
        if not self._is_closed:
            self._next.cancel()
            self._look()

    def close(self) -> None:
        """Stop sampling for good."""
        self._is_closed = True
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(self._looker.period_s, self._look)
        try:
            event = self._looker.look_at(self._loop.time(), self._page, self._pid)
        except Exception:  # a system may refuse a thread, or have no /proc; the watch continues
            if not self._has_failed:
                logger.warning("A worker process can't be observed.", exc_info=True)
            self._has_failed = True
            return
        if event is not None:
            self._tell(event)


_MAX_SAMPLE_PERIOD_S = 0.2
_LOOKS = 25
"""Minimum samples in a window. The kernel doesn't count the time that a process is held."""


class UtilizationProbe:
    """Measures one worker's main thread, and the CPUs of all its threads.

    Pure except for `look_at`: the caller has the clock. A thread is busy unless it waits for
    others: it runs, waits for a CPU or a device, or is stopped by a signal. All ranks have the same
    windows, because the last step of joining is a collective operation.
    """

    def __init__(
        self, *, attempt: int, rank: int, window_s: float, now: float, gpu_meter: GpuMeter | None
    ) -> None:
        """
        Args:
            window_s: seconds of a window.
            now: start of the first window, in seconds.
        """
        self.period_s = min(_MAX_SAMPLE_PERIOD_S, window_s / _LOOKS)
        self._attempt = attempt
        self._rank = rank
        self._window_s = window_s
        self._began = now
        self._window = -1
        self._opened = now
        self._beats = 0
        self._busy_s = self._cpu_s = 0.0
        self._looks = 0
        self._held = 0
        self._gpu_meter = gpu_meter
        self._requested = -1
        """The last window in which the GPUs were read."""

    def look_at(self, now: float, page: Page, pid: int) -> Load | None:
        """Sample a running worker process."""
        load = self.look(
            now,
            beats=page.beats,
            is_held=is_held(pid),
            busy_s=lambda: busy_seconds(pid),
            cpu_s=lambda: process_cpu_seconds(pid),
        )
        meter = self._gpu_meter
        if meter is not None and self._is_time_for_gpus(now):
            meter.request()
        if load is None:
            return None
        gpus = () if meter is None else meter.take()
        return replace(load, memory=resident_bytes(pid), gpus=gpus)

    def _is_time_for_gpus(self, now: float) -> bool:
        """Return whether the second half of a window begins, once per window."""
        windows = (now - self._began) / self._window_s
        if windows % 1 < 0.5 or int(windows) == self._requested:
            return False
        self._requested = int(windows)
        return True

    def look(
        self,
        now: float,
        *,
        beats: int,
        is_held: bool,
        busy_s: Callable[[], float],
        cpu_s: Callable[[], float],
    ) -> Load | None:
        """Add a sample, and return the load if this ends a window.

        A window without progress has no load, nor has one whose end was missed because the whole
        machine was suspended.

        Args:
            now: time in seconds.
            beats: count of the worker process's progress so far.
            is_held: whether a signal or a device keeps it from running.
            busy_s: returns the seconds that it has run or waited for a CPU so far.
            cpu_s: returns the CPU seconds of all its threads so far.
        """
        self._looks += 1
        self._held += is_held
        window = int((now - self._began) / self._window_s)
        if window == self._window:
            return None
        spent, cpu, load = busy_s(), cpu_s(), None
        was_seen = self._window >= 0 and window == self._window + 1
        if was_seen and beats != self._beats:
            share = (spent - self._busy_s) / (now - self._opened) + self._held / self._looks
            load = Load(
                attempt=self._attempt,
                rank=self._rank,
                window=self._window,
                busy=min(1.0, max(0.0, share)),
                cpu=max(0.0, cpu - self._cpu_s) / (now - self._opened),
            )
        self._window, self._opened, self._beats = window, now, beats
        self._busy_s, self._cpu_s = spent, cpu
        self._looks = self._held = 0
        return load
