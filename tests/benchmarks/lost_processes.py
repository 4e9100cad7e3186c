"""What bench_recovery_agent kills, found from inside a trainer.

Functions are made in functions, so that they travel by value: no worker has this module.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import psutil


def agent() -> Callable[[], int]:
    """Finds this trainer's agent: the actor that reads what it prints."""

    def find() -> int:
        def pipes_of(pid: int) -> Iterator[str]:
            directory = f"/proc/{pid}/fd"
            # Processes, of others too, come to an end while they are looked at.
            with contextlib.suppress(OSError):
                for descriptor in os.listdir(directory):
                    with contextlib.suppress(OSError):
                        yield os.readlink(f"{directory}/{descriptor}")

        mine = os.readlink("/proc/self/fd/1")
        processes = psutil.process_iter(["cmdline"])
        agents = [p.pid for p in processes if "ray::RayHost" in "".join(p.info["cmdline"] or ())]
        [found] = [pid for pid in agents if mine in pipes_of(pid)]
        return found

    return find


def raylet() -> Callable[[], int]:
    """Finds the raylet of this trainer's node."""

    def find() -> int:
        return next(p.pid for p in psutil.Process().parents() if p.name() == "raylet")

    return find
