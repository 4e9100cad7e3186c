"""The memory of a run: of all processes that descend from the one that started it.

What is added up is their proportional set size: a page that n processes map counts 1/n in each of
them, so code and shared memory count once. A page of Ray's object store that no process maps any
more isn't seen, which makes whoever uses the store look smaller. Looking takes the machine some
time, so nothing else is measured meanwhile. As a script, this is the process that looks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from select import select
from types import TracebackType

import psutil

_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes."""

    before: int
    peak: int


class Watch:
    """Watches this process and its descendants, from a process of its own."""

    def __enter__(self) -> Watch:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Its first line: from here on nothing is overlooked.
        self._before = int(self._readline())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if error is None:
                self.memory = Memory(before=self._before, peak=int(self._readline()))

    def _readline(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def watch(pid: int) -> None:
    """Print the memory as it is, and its peak when standard input ends."""
    peak = _total(pid)
    print(peak, flush=True)
    while not select([sys.stdin], [], [], _INTERVAL_S)[0]:
        peak = max(peak, _total(pid))
    print(peak, flush=True)


def _total(pid: int) -> int:
    """Bytes of a process and its descendants, without the one that asks."""
    return sum(_sizes(pid))


def _sizes(pid: int) -> Iterator[int]:
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        # It may have ended by now.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid():
                yield process.memory_full_info().pss


if __name__ == "__main__":
    watch(int(sys.argv[1]))
