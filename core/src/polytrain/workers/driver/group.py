"""The protocol between the controller and a run's workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from polytrain.workers.agents.calls import AgentEvent, Call
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import Member

Handler = Callable[[AgentEvent], None]


class WorkerGroup(Protocol):
    """Carries out the state machine's actions, and reports events."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the world, in rank order; known after `AgentsPlaced`."""

    def place(self, *, avoid: frozenset[str], without: frozenset[int]) -> None:
        """Acquire an agent for every rank of the next attempt.

        Leads to `AgentsPlaced` or `PlacementFailed`.

        Args:
            avoid: nodes to avoid, if other nodes can hold the workers.
            without: ranks of the last attempt whose agents must be replaced.
        """

    def launch(self, order: LaunchOrder) -> None:
        """Start a worker process for every rank."""

    def call(self, call: Call, ranks: Collection[int] | None = None) -> None:
        """Send a call to the agents of these ranks, by default all, without waiting.

        Ranks of an earlier, larger attempt are left out.
        """

    def wait(self, handle: Handler, timeout: float | None) -> None:
        """Wait for an event, and pass it and all others that have arrived to `handle`.

        Args:
            handle: called with each event.
            timeout: seconds after which to return without an event; None for no limit.
        """

    def wake(self) -> None:
        """Make `wait` return. Any thread may call this."""

    def close(self) -> None:
        """Release everything."""
