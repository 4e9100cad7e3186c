"""Requests for the stacks of all ranks, and what has come of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from polytrain.events.health import Stacks

_WAIT_S = 12.0
"""How long to wait for stacks. An agent answers within ten seconds."""


@dataclass(slots=True, kw_only=True)
class _PendingStacks:
    attempt: int
    world_size: int
    deadline: float
    requests: list[str]
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class StacksRequests:
    """Collects stacks for requests that come while an attempt runs. Pure: no clock."""

    _pending: _PendingStacks | None = None

    @property
    def deadline(self) -> float | None:
        """When `answered` may have answers without another event."""
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
            deadline=now + _WAIT_S,
            requests=[*before, request],
        )
        return True

    def take(self, stacks: Stacks) -> None:
        """Note a rank's stacks. Those of other attempts are ignored."""
        if self._pending is not None and stacks.attempt == self._pending.attempt:
            self._pending.stacks[stacks.rank] = stacks.text

    def answered(self, *, now: float) -> Iterator[tuple[str, Mapping[int, str]]]:
        """Yield each request with the stacks by rank, once all have come or the time is over."""
        pending = self._pending
        if pending is None:
            return
        if len(pending.stacks) < pending.world_size and now < pending.deadline:
            return
        self._pending = None
        stacks = dict(sorted(pending.stacks.items()))
        yield from ((request, stacks) for request in pending.requests)
