"""Looking at processes from outside, and waiting for what nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def title(process: psutil.Process) -> str:
    """A process's command line; empty if it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs: one that has ended may wait for its parent to take notice."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], Any], seconds: float = 30) -> bool:
    """Whether it becomes true. The kernel and Ray end things, and tell of it, in their own time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
