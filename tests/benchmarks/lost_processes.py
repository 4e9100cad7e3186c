"""What bench_recovery_agent kills, found from inside a trainer.

Functions are made in functions, so that they travel by value: no worker has this module.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psutil


def kill_agent() -> Callable[[], None]:
    """Kills this trainer's agent: the actor that reads what it prints."""

    def kill() -> None:
        def pipes_of(pid: int) -> Iterator[str]:
            directory = f"/proc/{pid}/fd"
            for descriptor in os.listdir(directory):
                try:
                    yield os.readlink(f"{directory}/{descriptor}")
                except FileNotFoundError:
                    continue

        mine = os.readlink("/proc/self/fd/1")
        agents = [p for p in psutil.process_iter() if "ray::Agent" in "".join(p.cmdline())]
        [agent] = [agent for agent in agents if mine in pipes_of(agent.pid)]
        agent.send_signal(signal.SIGKILL)

    return kill


def kill_raylet() -> Callable[[], None]:
    """Kills the raylet of this trainer's node."""

    def kill() -> None:
        raylet = next(p for p in psutil.Process().parents() if p.name() == "raylet")
        raylet.send_signal(signal.SIGKILL)

    return kill
