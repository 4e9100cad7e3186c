"""Parties that live at the same time, and take steps in turn: one percent is to be seen."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_TIMEOUT_S = 60.0


class Team:
    """The workers of one party, which wait to be told how many steps to take."""

    def __init__(self, address: Path, workers: int) -> None:
        self.address = str(address)
        self._workers = workers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._listener.settimeout(_TIMEOUT_S)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Callable[[int, int], float]]:
        """While all workers listen.

        Yields:
            What has them take steps, and returns seconds for each.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            lines = []
            for _ in range(self._workers):
                worker = stack.enter_context(self._listener.accept()[0])
                lines.append(stack.enter_context(worker.makefile("rw")))

            def step(steps: int, every: int) -> float:
                for line in lines:
                    line.write(f"{json.dumps([steps, every])}\n")
                    line.flush()
                return max(float(line.readline()) for line in lines) / steps

            yield step


def reported_steps(address: str) -> Iterator[int]:
    """A worker's steps, which wait between turns, until nobody asks for more.

    Args:
        address: of its party's team.

    Yields:
        The number of the step that is to be taken, from 1.
    """
    number = 0
    with socket.socket(socket.AF_UNIX) as referee:
        referee.connect(address)
        with referee.makefile("rw") as commands:
            for command in commands:
                steps, _ = json.loads(command)
                begun = time.perf_counter()
                for _ in range(steps):
                    number += 1
                    yield number
                commands.write(f"{time.perf_counter() - begun}\n")
                commands.flush()
