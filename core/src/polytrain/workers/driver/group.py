"""Protocols of a run's workers: group, cluster, launcher of agents; and the driver's mailbox."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from polytrain.config.configs import ScalingConfig
from polytrain.events.driver import DriverEvent
from polytrain.events.notices import LeavingNode
from polytrain.policy.autoscaling import Outlook
from polytrain.policy.scaling import Starting
from polytrain.workers.agents.agent_host import AgentHandle, Delivery, PoolEvent
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import (
    AgentCall,
    AgentEvent,
    Call,
    RankAssignment,
    SharedStore,
    StreamOrder,
)
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import Member

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset

Mailbox = queue.SimpleQueue[Delivery]
"""Any thread may put events into it, and a signal handler: `put` is reentrant."""

_LONGEST_WAIT_S = 1.0
"""Maximum seconds of one wait: a signal just before it doesn't interrupt it."""

Handler = Callable[[AgentEvent | DriverEvent], None]


def arrived(
    mailbox: Mailbox, timeout_s: float | None = None
) -> Iterator[AgentEvent | DriverEvent | PoolEvent]:
    """Wait for mail for at most a second, and yield all events that have arrived by then.

    What arrives while they are handled is left to the next call. Workers may report as fast as the
    driver handles reports, and only between two calls it looks at deadlines.

    Args:
        mailbox: the mailbox, which only this thread reads.
        timeout_s: seconds to wait, if they are fewer.
    """
    with contextlib.suppress(queue.Empty):
        limit_s = _LONGEST_WAIT_S if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
        first = mailbox.get(timeout=limit_s)
        others = mailbox.qsize()
        yield from first
        for _ in range(others):
            yield from mailbox.get_nowait()


class WorkerGroup(Protocol):
    """Carries out the state machine's actions, and reports events."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the world, in rank order; known after `AgentsPlaced`."""

    def place(self, *, avoid: Mapping[str, float], without: frozenset[int]) -> None:
        """Acquire an agent for every rank of the next attempt.

        Leads to `AgentsPlaced` or `PlacementFailed`.

        Args:
            avoid: nodes to avoid, if other nodes can hold the workers → the monotonic time from
                which they may get some again.
            without: ranks of the last attempt whose agents must be replaced.
        """

    def launch(self, order: LaunchOrder) -> None:
        """Start a worker process for every rank."""

    def call(self, call: Call, ranks: Collection[int] | None = None) -> None:
        """Send a call to the agents of these ranks, by default all, without waiting.

        Ranks of an earlier, larger attempt are left out.
        """

    def wait(self, handle: Handler, timeout: float | None) -> None:
        """Wait for mail, and pass all events that have arrived to `handle`.

        Args:
            handle: called with each event.
            timeout: seconds after which to return without an event; None for no limit.
        """

    def close(self) -> None:
        """Release everything."""


class Bundles:
    """What a run has reserved for its agents. On one machine there is nothing to reserve."""

    def reserve(self, bundles: int, strategy: str) -> None:
        """Reserve room for this number of agents, all or nothing."""
        return

    def move(self, bundles: Collection[int], strategy: str, avoid: frozenset[str]) -> None:
        """Reserve other room for bundles without agents, all or nothing, not on these nodes."""
        return

    def move_back(self, bundles: Collection[int]) -> frozenset[int]:
        """Undo the move of those of these bundles that aren't placed yet.

        Returns:
            the bundles for which to request agents anew: these, and others that moved with them.
        """
        return frozenset()

    def free_unused(self) -> None:
        """Free the room that no bundle needs after a move."""
        return


class AgentLauncher(Protocol):
    """Requests agents, calls them, and ends them."""

    @property
    def bundles(self) -> Bundles:
        """What is reserved for its agents."""

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        """Request an agent, which later arrives or is lost.

        Args:
            bundle: a reserved bundle; None for any node.
            avoid: nodes to avoid if `bundle` is None.
        """

    def call(
        self, call: AgentCall, assignments: Mapping[AgentHandle, RankAssignment | None]
    ) -> None:
        """Send a call to agents, without waiting.

        Args:
            assignments: agent → the rank that `LaunchProcess` gives it; None if it keeps its own.
        """

    def dismiss(self, agent_handle: AgentHandle) -> None:
        """End an agent."""

    def close(self, timeout_s: float) -> None:
        """End all agents, and release their resources, within this time."""

    def try_links(self, agent_handles: Sequence[AgentHandle]) -> None:
        """Have the nodes of these agents connect to each other; leads to `LinksTried`."""
        return

    def introduce(self, neighbours: Mapping[AgentHandle, AgentHandle | None]) -> None:
        """Say to which agent on another host each agent sends copies of its rank's state."""
        return

    def outlook(self) -> Outlook | None:
        """Return the outlook for the requested agents; None if nodes are never added."""
        return None

    def starting(self) -> Starting:
        """Return the requested agents that have their resources, and are starting."""
        return Starting()


class BackgroundActivity(Protocol):
    """A background activity that runs until it is closed."""

    def close(self) -> None:
        """End the activity."""


class StreamSource(BackgroundActivity, Protocol):
    """Starts the streaming data sets of each attempt."""

    def start(self) -> tuple[StreamOrder, ...]:
        """Start the data sets for a new attempt."""


class AgentCluster(SharedStore, Protocol):
    """The cluster on which a run's agents run: a Ray cluster, or this machine."""

    @property
    def node_id(self) -> str:
        """The driver's node."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables that agents have, and the driver may not have."""

    def living_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return each node's total resources."""

    def free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return each node's free resources."""

    def launcher(
        self,
        spec: AgentSpec,
        job: bytes,
        scaling: ScalingConfig,
        mailbox: Mailbox,
    ) -> AgentLauncher:
        """Return the launcher of agents.

        Args:
            job: the pickled job of their worker processes.
            mailbox: receives the agents' events.
        """

    def streams(self, datasets: Sequence[RunDataset], held: Mapping[str, float]) -> StreamSource:
        """Return the source of the streaming data sets; workers hold these resources together."""

    def watch(self, tell: Callable[[Mapping[str, LeavingNode]], None]) -> BackgroundActivity:
        """Report draining nodes, by node id."""
