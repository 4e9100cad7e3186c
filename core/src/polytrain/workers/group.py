"""The protocol between the controller and a run's workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from polytrain.checkpoint.events import CheckpointEvent, CheckpointsAsked
from polytrain.events.attempt import Event, Reported
from polytrain.events.health import HealthEvent
from polytrain.events.output import Output
from polytrain.workers.job import LaunchOrder
from polytrain_plugins import Member, Offer

Happening = Event | Reported | CheckpointEvent | CheckpointsAsked | Output | HealthEvent
Handler = Callable[[Happening], None]


class WorkerGroup(Protocol):
    """Carries out the state machine's actions, and reports events."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Return every rank's place, in rank order; known after `AgentsPlaced`."""

    def place(self, *, avoid: frozenset[str], without: frozenset[int]) -> None:
        """Acquire an agent for every rank of the next attempt.

        Leads to `AgentsPlaced` or `PlacementFailed`.

        Args:
            avoid: nodes to leave, if others can hold the workers.
            without: ranks of the last attempt whose agents must be replaced.
        """

    def launch(self, order: LaunchOrder) -> None:
        """Start a worker process for every rank."""

    def send_roster(self, attempt: int, offers: tuple[Offer, ...]) -> None:
        """Send all offers to every worker process."""

    def drain(self, attempt: int) -> None:
        """Ask every worker process to make a checkpoint and stop."""

    def leave(self, attempt: int) -> None:
        """Let every worker process leave the collective and end."""

    def kill(self, attempt: int) -> None:
        """Kill every worker process."""

    def dump_stacks(self, attempt: int, *, pausing: bool) -> None:
        """Dump the stacks of every worker process; leads to `Stacks` of each in a bounded time.

        Args:
            attempt: the attempt of the worker processes.
            pausing: whether they may be paused for the dump.
        """

    def store_rest(
        self, attempt: int, rank: int, checkpoint: int, stored_already: Mapping[str, str] | None
    ) -> None:
        """Let an agent store a rank's part, which it holds back until rank 0's part is stored.

        Args:
            attempt: the attempt of the part.
            rank: the rank of the part; not 0.
            checkpoint: the number of the checkpoint.
            stored_already: name → SHA-256 of rank 0's files; None drops the part.
        """

    def acknowledge(self, attempt: int, checkpoint: int, ranks: Collection[int]) -> None:
        """Notify these ranks' worker processes that this checkpoint is committed or dropped."""

    def send_checkpoints(
        self, attempt: int, rank: int, number: int, checkpoints: Sequence[Any]
    ) -> None:
        """Answer a rank's question for the run's checkpoints.

        Args:
            attempt: the attempt of the worker process.
            rank: the rank.
            number: the number of the question.
            checkpoints: of each its path, metrics and status, as plain values.
        """

    def wait(self, handle: Handler, timeout: float | None) -> None:
        """Wait for an event, and pass it and all later ones that are known to `handle`.

        Args:
            handle: called with each event.
            timeout: seconds after which to return without an event.
        """

    def wake(self) -> None:
        """Make `wait` return. Any thread may call this."""

    def close(self) -> None:
        """Release everything."""
