"""How busy a worker was in a window: what it did, and what kept it, but no wait for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.events.attempt import Load
from polytrain.linux.nvidia_gpus import GpuMeter, GpuUse
from polytrain.linux.processes import busy_seconds, is_held
from polytrain.linux.progress_page import Page
from polytrain.observe.probes import UtilizationProbe
from polytrain.testing.processes import eventually

WINDOW = 10.0


@dataclass
class Worker:
    """A worker of which everything is known."""

    now: float = 1000.0
    beats: int = 0
    busy: float = 50.0
    cpu: float = 80.0
    asked: int = 0
    events: list[Load] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meter = UtilizationProbe(
            attempt=3, rank=1, window_s=WINDOW, now=self.now, gpu_meter=GpuMeter(0, {})
        )
        self.look(0.0)

    def look(
        self, after: float, *, busy: float = 0.0, cpu: float = 0.0, is_held: bool = False
    ) -> None:
        self.now += after
        self.busy += busy
        self.cpu += cpu

        def busy_s() -> float:
            self.asked += 1
            return self.busy

        load = self.meter.look(
            self.now, beats=self.beats, is_held=is_held, busy_s=busy_s, cpu_s=lambda: self.cpu
        )
        if load is not None:
            self.events.append(load)

    def go(self, looks: int, *, busy: float = 0.0, is_held: bool = False) -> None:
        for _ in range(looks):
            self.look(0.25, busy=0.25 * busy, is_held=is_held)


def test_a_window_is_reported_once_when_it_is_over() -> None:
    worker = Worker()
    for _ in range(3):
        worker.beats += 1
        worker.go(40, busy=0.75)
    assert [(load.attempt, load.rank, load.window) for load in worker.events] == [
        (3, 1, 0),
        (3, 1, 1),
        (3, 1, 2),
    ]
    assert [load.busy for load in worker.events] == [pytest.approx(0.75)] * 3
    # The kernel is asked for times at the borders only.
    assert worker.asked == 4


def test_all_threads_together_may_use_more_than_one_cpu() -> None:
    worker = Worker()
    worker.beats += 1
    for _ in range(40):
        worker.look(0.25, busy=0.1, cpu=0.25 * 2.5)
    assert worker.events[0].cpu == pytest.approx(2.5)


def test_what_keeps_a_worker_from_running_is_no_wait_for_others() -> None:
    worker = Worker()
    worker.beats += 1
    worker.go(10, busy=1.0)
    worker.go(30, is_held=True)
    assert worker.events[0].busy == pytest.approx(1.0)


class CountingMeter(GpuMeter):
    """Has read a GPU as soon as it is asked to."""

    def __init__(self) -> None:
        super().__init__(0, {})
        self.requests = 0

    def request(self) -> None:
        self.requests += 1

    def take(self) -> tuple[GpuUse, ...]:
        return (GpuUse(0.5, self.requests),)


def test_gpus_are_read_once_in_each_window() -> None:
    meter, loads = CountingMeter(), []
    probe = UtilizationProbe(attempt=0, rank=0, window_s=WINDOW, now=0.0, gpu_meter=meter)
    for look in range(121):
        page = cast(Page, SimpleNamespace(beats=look))
        load = probe.look_at(look * 0.25, page, os.getpid())
        if load is not None:
            loads.append(load)
    assert [load.gpus for load in loads] == [(GpuUse(0.5, read),) for read in (1, 2, 3)]


def test_nothing_is_reported_a_window_without_progress() -> None:
    worker = Worker()
    worker.go(40, busy=1.0)
    worker.beats += 1
    worker.go(40, busy=1.0)
    assert [load.window for load in worker.events] == [1]


def test_a_machine_that_stood_still_has_measured_nothing() -> None:
    worker = Worker()
    worker.beats += 1
    worker.look(5 * WINDOW)
    assert worker.events == []
    worker.beats += 1
    worker.go(40, busy=0.5)
    assert [load.window for load in worker.events] == [5]


@given(st.lists(st.tuples(st.floats(0.01, 15), st.floats(0, 1), st.booleans())))
def test_a_share_is_a_share(looks: list[tuple[float, float, bool]]) -> None:
    worker = Worker()
    for after, busy, held in looks:
        worker.beats += 1
        worker.look(after, busy=busy * after, is_held=held)
    assert all(0 <= load.busy <= 1 for load in worker.events)
    windows = [load.window for load in worker.events]
    assert windows == sorted(set(windows))


# How busy a process is, is what it measures.
@pytest.mark.alone
def test_a_process_that_waits_is_not_busy_and_one_that_works_is() -> None:
    code = "import sys\nsys.stdin.readline()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        try:
            assert eventually(lambda: is_waiting(process.pid))
            before = busy_seconds(process.pid)
            assert busy_seconds(process.pid) == before
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
            assert eventually(lambda: busy_seconds(process.pid) > before + 0.1)
            assert not is_held(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            assert eventually(lambda: is_held(process.pid))
        finally:
            process.kill()
    assert busy_seconds(process.pid) == 0.0


def is_waiting(pid: int) -> bool:
    """Whether it is in its call for a line: asleep, with nothing left to import."""
    with open(f"/proc/{pid}/syscall") as call:
        return call.read().startswith("0 0x0 ")
