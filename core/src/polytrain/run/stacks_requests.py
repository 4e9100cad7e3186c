"""Answers other processes that want the stacks of all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from polytrain.events.attempt import STACKS_WITHIN_S, Stacks
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.requests import RemoteRequests
from polytrain.workers.agents.calls import ReadStacks
from polytrain.workers.driver.group import WorkerGroup


@dataclass(slots=True, kw_only=True)
class StacksAnswers:
    """Collects the ranks' stacks for requests that arrive while an attempt runs."""

    group: WorkerGroup
    remote_requests: RemoteRequests
    background_tasks: BackgroundTasks
    deadlines: Deadlines
    _requests: list[str] = field(default_factory=list)
    """Requests that aren't answered yet."""

    _stacks: dict[int, str] = field(default_factory=dict)
    _attempt: int = -1
    _world_size: int = 0

    def wanted(self, request: str, *, attempt: int, world_size: int) -> None:
        """Ask the ranks of an attempt, unless they are being asked already."""
        is_asking = bool(self._requests) and self._attempt == attempt
        self._requests.append(request)
        if is_asking:
            return
        self._attempt, self._world_size = attempt, world_size
        self._stacks.clear()
        self.group.call(ReadStacks(attempt=attempt, pausing=False))
        self.deadlines.set(Deadline.STACKS, time.monotonic() + STACKS_WITHIN_S)

    def take(self, stacks: Stacks) -> None:
        """Note a rank's stacks, and answer once all have come; ignore those of other attempts."""
        if self._requests and stacks.attempt == self._attempt:
            self._stacks[stacks.rank] = stacks.text
            if len(self._stacks) == self._world_size:
                self.answer()

    def answer(self) -> None:
        """Answer all requests with the stacks that have come."""
        stacks = dict(sorted(self._stacks.items()))
        for request in self._requests:
            answer = partial(self.remote_requests.answer, request, {"stacks": stacks})
            self.background_tasks.submit(answer)
        self._requests.clear()
        self.deadlines.set(Deadline.STACKS, None)
