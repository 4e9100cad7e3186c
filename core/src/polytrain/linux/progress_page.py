"""The progress page: memory that a worker process writes and its agent reads.

It holds a count of the process's progress, its stage and its latest reports. A process that hangs
can't answer requests, but its page can still be read, and writing to it needs no system call. A
process without an agent has a page that nobody reads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

SIZE = 1 << 16
"""Size of the page in bytes. `observe.stacks` uses the memory after it."""

_BEATS, _STAGE = 0, 1

_REPORTS = 64
"""Offset in bytes of the page's part for `workers.processes.channel.Ring`."""


class WorkerStage(IntEnum):
    """The stage of a worker process."""

    STARTING = 0
    OFFERING = 1
    JOINING = 2
    TRAINING = 3
    WAITING_FOR_COMMIT = 4
    WAITING_FOR_DATA = 5
    DONE = 6

    @property
    def is_wait(self) -> bool:
        """Whether it is a wait for something outside the training, which has its own time limit."""
        return self in (WorkerStage.WAITING_FOR_COMMIT, WorkerStage.WAITING_FOR_DATA)

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


_page = memoryview(bytearray(SIZE)).cast("Q")


def beat() -> None:
    """Record that the training makes progress."""
    _page[_BEATS] += 1


def enter(stage: WorkerStage) -> None:
    """Record that a stage begins."""
    _page[_STAGE] = stage


@contextmanager
def during(stage: WorkerStage) -> Iterator[None]:
    """Record a stage for the duration of the block."""
    before = _page[_STAGE]
    _page[_STAGE] = stage
    try:
        yield
    finally:
        _page[_STAGE] = before


def write_to(descriptor: int) -> None:
    """Write to the page that the agent has made from now on."""
    global _page
    _page = memoryview(mmap.mmap(descriptor, SIZE)).cast("Q")


def reports() -> memoryview:
    """Return the part of the page for reports."""
    return _page.cast("B")[_REPORTS:]


class Page:
    """The page of another process, for reading."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("polytrain-progress")
        os.ftruncate(self.descriptor, SIZE)
        self._memory = mmap.mmap(self.descriptor, SIZE)
        self._numbers = memoryview(self._memory).cast("Q")
        self.reports = self._numbers.cast("B")[_REPORTS:]
        """The part of the page for reports."""

    @property
    def beats(self) -> int:
        """The number of times that its writer has recorded progress."""
        return self._numbers[_BEATS]

    @property
    def stage(self) -> WorkerStage:
        """The writer's stage."""
        return WorkerStage(self._numbers[_STAGE])

    def close(self) -> None:
        """Release the memory here; a live writer keeps its own mapping."""
        self.reports.release()
        self._numbers.release()
        self._memory.close()
        os.close(self.descriptor)
