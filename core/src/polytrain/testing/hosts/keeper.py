"""The process whose network is the switch. It removes the hosts when their owner is gone.

A script: it runs by its path, and imports nothing of polytrain, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_SECONDS = 20


def keep(owner: int, groups: Path) -> None:
    """Wait for the owner's end, or for that of its `with` block, and remove all hosts.

    Args:
        owner: a pidfd. Unlike a pipe, no child of the owner can keep it from being readable.
        groups: the directory of the hosts' control groups.
    """
    groups.mkdir()
    try:
        print("ready", flush=True)
        select.select([owner, sys.stdin], [], [])
    finally:
        _remove(groups)


def _remove(groups: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    for group in (path for path in groups.iterdir() if path.is_dir()):
        while time.monotonic() < deadline:
            _kill(group)
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.01)
    groups.rmdir()


def _kill(group: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    # What is frozen dies only when it is thawed.
    for file, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (group / file).exists():
            (group / file).write_text(value)


if __name__ == "__main__":
    # Ctrl-C in a terminal reaches the whole process group: the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep(int(sys.argv[1]), Path(sys.argv[2]))
