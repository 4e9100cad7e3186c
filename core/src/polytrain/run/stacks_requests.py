"""Answers other processes that want the stacks of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from polytrain.events.attempt import Stacks
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.requests import RemoteRequests
from polytrain.workers.agents.calls import ReadStacks
from polytrain.workers.driver.group import WorkerGroup

_STACKS_WITHIN_S = 12.0
"""Seconds to wait for stacks. An agent answers within ten seconds."""


@dataclass(slots=True, kw_only=True)
class _PendingStacks:
    attempt: int
    world_size: int
    deadline: float
    requests: list[str]
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class StacksRequests:
    """Collects stacks for requests that arrive while an attempt runs. Pure: no clock."""

    _pending: _PendingStacks | None = None

    @property
    def deadline(self) -> float | None:
        """The time at which `answered` may have answers without another event."""
        return None if self._pending is None else self._pending.deadline

    def add(self, request: str, *, attempt: int, world_size: int, now: float) -> bool:
        """Note a request; return whether the ranks must be asked for their stacks."""
        pending = self._pending
        if pending is not None and pending.attempt == attempt:
            pending.requests.append(request)
            return False
        before = [] if pending is None else pending.requests
        self._pending = _PendingStacks(
            attempt=attempt,
            world_size=world_size,
            deadline=now + _STACKS_WITHIN_S,
            requests=[*before, request],
        )
        return True

    def take(self, stacks: Stacks) -> None:
        """Note a rank's stacks. Those of other attempts are ignored."""
        if self._pending is not None and stacks.attempt == self._pending.attempt:
            self._pending.stacks[stacks.rank] = stacks.text

    def answered(self, *, now: float) -> Iterator[tuple[str, Mapping[int, str]]]:
        """Yield each request with the stacks by rank, once all have arrived or at its deadline."""
        pending = self._pending
        if pending is None:
            return
        if len(pending.stacks) < pending.world_size and now < pending.deadline:
            return
        self._pending = None
        stacks = dict(sorted(pending.stacks.items()))
        yield from ((request, stacks) for request in pending.requests)


@dataclass(slots=True, kw_only=True)
class StacksAnswers:
    """Asks the ranks for their stacks, and answers who wants them."""

    group: WorkerGroup
    remote_requests: RemoteRequests
    background_tasks: BackgroundTasks
    deadlines: Deadlines
    _requests: StacksRequests = field(default_factory=StacksRequests)

    def wanted(self, request: str, *, attempt: int, world_size: int) -> None:
        """Ask the ranks of an attempt, unless they are being asked already."""
        now = time.monotonic()
        if self._requests.add(request, attempt=attempt, world_size=world_size, now=now):
            self.group.call(ReadStacks(attempt=attempt, pausing=False))
        self.deadlines.set(Deadline.STACKS, self._requests.deadline)

    def take(self, stacks: Stacks) -> None:
        """Note a rank's stacks."""
        self._requests.take(stacks)
        self.answer()

    def answer(self) -> None:
        """Answer once all stacks have arrived, or at the deadline with those that have."""
        for request, stacks in self._requests.answered(now=time.monotonic()):
            answer = partial(self.remote_requests.answer, request, {"stacks": stacks})
            self.background_tasks.submit(answer)
        self.deadlines.set(Deadline.STACKS, self._requests.deadline)
