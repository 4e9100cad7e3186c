"""Requests for the stacks of all ranks, and what has come of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from polytrain.events.health import Stacks

_WAIT_S = 12.0
"""How long to wait for stacks. An agent answers within ten seconds."""


@dataclass(slots=True, kw_only=True)
class _Inquiry:
    attempt: int
    world_size: int
    deadline: float
    requests: list[str]
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class StacksInquiries:
    """Collects stacks for requests that come while an attempt runs. Pure: no clock."""

    _inquiry: _Inquiry | None = None

    @property
    def deadline(self) -> float | None:
        """When `answered` may have answers without another event."""
        return None if self._inquiry is None else self._inquiry.deadline

    def add(self, request: str, *, attempt: int, world_size: int, now: float) -> bool:
        """Note a request; return whether the ranks must be asked for their stacks."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.attempt == attempt:
            inquiry.requests.append(request)
            return False
        before = [] if inquiry is None else inquiry.requests
        self._inquiry = _Inquiry(
            attempt=attempt,
            world_size=world_size,
            deadline=now + _WAIT_S,
            requests=[*before, request],
        )
        return True

    def take(self, stacks: Stacks) -> None:
        """Note a rank's stacks. Those of other attempts are ignored."""
        if self._inquiry is not None and stacks.attempt == self._inquiry.attempt:
            self._inquiry.stacks[stacks.rank] = stacks.text

    def answered(self, *, now: float) -> Iterator[tuple[str, Mapping[int, str]]]:
        """Yield each request with the stacks by rank, once all have come or the time is over."""
        inquiry = self._inquiry
        if inquiry is None:
            return
        if len(inquiry.stacks) < inquiry.world_size and now < inquiry.deadline:
            return
        self._inquiry = None
        stacks = dict(sorted(inquiry.stacks.items()))
        yield from ((request, stacks) for request in inquiry.requests)
