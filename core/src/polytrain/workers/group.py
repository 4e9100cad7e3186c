"""The workers of a run as the controller sees them, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polytrain.checkpoint.events import CheckpointEvent, FilesIgnored
from polytrain.common.events import Event
from polytrain.common.output import Output
from polytrain.monitoring.health_events import HealthEvent
from polytrain.workers.job import LaunchOrder
from polytrain_plugins import Member, Offer

Happening = Event | CheckpointEvent | FilesIgnored | Output | HealthEvent
Handler = Callable[[Happening], None]


class WorkerGroup(Protocol):
    """Carries out what the state machine wants, and says what happens."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody's place, in rank order; known once `AgentsPlaced` has happened."""

    def place(self, *, avoid: frozenset[str], without: frozenset[int]) -> None:
        """Have an agent for every rank of the next attempt.

        Leads to `AgentsPlaced` or `PlacementFailed`.

        Args:
            avoid: nodes to leave, if others can hold the workers.
            without: ranks of the last attempt whose agents are to be replaced.
        """

    def launch(self, order: LaunchOrder) -> None:
        """Start a worker process for every rank."""

    def send_roster(self, attempt: int, offers: tuple[Offer, ...]) -> None:
        """Tell every worker process everybody's offer."""

    def drain(self, attempt: int) -> None:
        """Have every worker process make a checkpoint, and stop."""

    def leave(self, attempt: int) -> None:
        """Let every worker process leave the collective and end."""

    def kill(self, attempt: int) -> None:
        """End every worker process at once."""

    def dump_stacks(self, attempt: int, *, pausing: bool) -> None:
        """Ask what every worker process is doing; leads to `Stacks` of each within a bounded time.

        Args:
            attempt: whose worker processes.
            pausing: whether they may be paused for it.
        """

    def acknowledge(self, attempt: int, checkpoint: int) -> None:
        """Tell the worker processes that this checkpoint isn't on its way any more."""

    def wait(self, handle: Handler, timeout: float | None) -> None:
        """Wait until something happens; hand it, and all that is known by then, to `handle`.

        Args:
            handle: what to do with it.
            timeout: seconds after which to return all the same.
        """

    def wake(self) -> None:
        """Let `wait` return, from whatever thread this is called."""

    def close(self) -> None:
        """Release everything."""
