"""Helpers that look at processes from outside, and wait for conditions."""

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
    """Whether a process still runs. A zombie, whose parent hasn't reaped it, doesn't."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], Any], seconds: float = 30) -> bool:
    """Whether a condition becomes true in time. The kernel and Ray end processes with a delay."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
