"""Looks at processes from outside, waits for conditions, and finds what runs have left behind."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.checkpoint.staging import STAGING
from polytrain.workers.available_clusters import ray_is_initialized
from polytrain.workers.processes.cache import kept_processes


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


_ENDS_WITHIN_S = 60.0
"""Seconds after a run in which its processes have to be gone; a machine may be busy."""

_MARK = "POLYTRAIN_CONFORMANCE_PROCESS"
"""A variable that all processes of this test session inherit; other processes are ignored."""


def mark_processes() -> None:
    """Mark the processes that this process starts from now on."""
    os.environ[_MARK] = str(os.getpid())


def our_processes() -> list[psutil.Process]:
    """Live zygotes, worker processes and agents of all runs of this session."""
    # A zygote may have been kept since before the mark, and Ray overwrites the environment with its
    # titles. Those whose parents are gone have the mark alone.
    below = psutil.Process().children(recursive=True)
    alone = [process for process in psutil.process_iter() if _is_marked(process)]
    known = ("polytrain.workers", "ray::RayHost")
    return [each for each in {*below, *alone} if any(name in title(each) for name in known)]


def _left_processes() -> list[psutil.Process]:
    # Zygotes are kept for the next run on purpose.
    kept = kept_processes()
    return [process for process in our_processes() if process.pid not in kept]


def leftovers(run: Path) -> list[str]:
    """What a run that has ended has left behind; should be empty.

    Args:
        run: its directory.
    """
    # The kernel and Ray end processes with a delay.
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while (processes := _left_processes()) and _has_ended_by(deadline, processes[0]):
        pass
    left = [f"the process {process}" for process in processes]
    if ray_is_initialized():
        left += _left_on_ray()
    if (run / STAGING).exists():
        left.append(f"{run / STAGING}")
    checkpoints = (path for path in run.glob("checkpoints/*") if path.is_dir())
    left += [str(path) for path in checkpoints if not (path / MANIFEST_NAME).exists()]
    return left


def _has_ended_by(deadline: float, process: psutil.Process) -> bool:
    """Wait for a process's end, and return whether it comes before a monotonic time."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # Its id may be that of another process by now.
        if not is_alive(process):
            return True
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        return bool(end.poll(1000 * max(0.0, deadline - time.monotonic())))
    finally:
        os.close(descriptor)


def _left_on_ray() -> list[str]:
    import ray

    from polytrain.ray_api.state import free_nodes, is_reachable, living_nodes

    groups = ray.util.placement_group_table().values()
    left = [f"the placement group {g['name']}" for g in groups if g["state"] != "REMOVED"]

    # Ray counts resources with a delay, too, and those of a node that is gone for a minute.
    def taken() -> list[str]:
        free = {node: each.get("CPU", 0) for node, each in free_nodes().items()}
        totals = {node: each.get("CPU", 0) for node, each in living_nodes().items()}
        return [
            f"{free.get(node, 0)} of {total} CPUs of the node {node} are free"
            for node, total in totals.items()
            if free.get(node, 0) != total and is_reachable(node)
        ]

    if not eventually(lambda: not taken()):
        left += taken()
    return left


def _is_marked(process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get(_MARK) == str(os.getpid()))
    except psutil.Error:
        return False
