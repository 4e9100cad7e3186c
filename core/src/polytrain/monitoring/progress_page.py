"""What a worker process shows of itself while it works: a page of memory that its agent reads.

How often it has made progress, the stage that it is in, and what it has reported lately. A worker
that hangs can't answer questions; what it has written last is there all the same, and writing it
costs no system call. A process that isn't a worker of an agent has a page of its own, which nobody
reads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

SIZE = 1 << 16
"""Of the page, in bytes. What comes after it in its memory is `workers.stacks`'s."""

_BEATS, _STAGE = 0, 1

_REPORTS = 64
"""Where `workers.report_ring`'s part of the page begins, in bytes."""


class Stage(IntEnum):
    """What a worker process is about."""

    STARTING = 0
    OFFERING = 1
    JOINING = 2
    TRAINING = 3
    WAITING_FOR_COMMIT = 4
    WAITING_FOR_DATA = 5
    DONE = 6

    @property
    def is_wait(self) -> bool:
        """Whether it waits for something outside of the training, which has limits of its own."""
        return self in (Stage.WAITING_FOR_COMMIT, Stage.WAITING_FOR_DATA)

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


_page = memoryview(bytearray(SIZE)).cast("Q")


def beat() -> None:
    """Show that the training goes on."""
    _page[_BEATS] += 1


def enter(stage: Stage) -> None:
    """Show that a stage begins."""
    _page[_STAGE] = stage


@contextmanager
def during(stage: Stage) -> Iterator[None]:
    """Show a stage for as long as the block takes."""
    before = _page[_STAGE]
    _page[_STAGE] = stage
    try:
        yield
    finally:
        _page[_STAGE] = before


def write_to(descriptor: int) -> None:
    """From now on, write into a page that somebody else has made."""
    global _page
    _page = memoryview(mmap.mmap(descriptor, SIZE)).cast("Q")


def reports() -> memoryview:
    """The part of the page for reports."""
    return _page.cast("B")[_REPORTS:]


class Page:
    """The page of another process, for reading."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("polytrain-pulse")
        os.ftruncate(self.descriptor, SIZE)
        self._memory = mmap.mmap(self.descriptor, SIZE)
        self._numbers = memoryview(self._memory).cast("Q")
        self.reports = self._numbers.cast("B")[_REPORTS:]
        """The part of the page for reports."""

    @property
    def beats(self) -> int:
        """How often its writer has made progress."""
        return self._numbers[_BEATS]

    @property
    def stage(self) -> Stage:
        """What its writer is about."""
        return Stage(self._numbers[_STAGE])

    def close(self) -> None:
        """Give the memory back; a writer that lives keeps its own."""
        self.reports.release()
        self._numbers.release()
        self._memory.close()
        os.close(self.descriptor)
