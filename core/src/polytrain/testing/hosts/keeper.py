"""Process 1 of a host, with which it ends, and the process that removes all hosts at the end.

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


def keep_host(owner: int) -> None:
    """Be process 1 of a host: let the kernel reap orphans, and wait for the end of the owner."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    _wait_for(owner)


def keep_switch(owner: int, groups: Path) -> None:
    """Be the process whose network is the switch.

    Remove all hosts at the end of their owner, or of its `with` block.

    Args:
        owner: a pidfd. Unlike a pipe, no child of the owner can keep it from being readable.
        groups: the directory of the hosts' control groups.
    """
    groups.mkdir()
    try:
        print("ready", flush=True)
        _wait_for(owner, sys.stdin.fileno())
    finally:
        _remove(groups)


def _wait_for(*descriptors: int) -> None:
    """Wait until one of the descriptors can be read. Unlike `select`, `poll` takes any number."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    waiting.poll()


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
    owner, *groups = sys.argv[1:]
    if groups:
        keep_switch(int(owner), Path(groups[0]))
    else:
        keep_host(int(owner))
