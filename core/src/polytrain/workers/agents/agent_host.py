"""The agents of one node on one event loop, and the driver's handles of them.

On one machine the host is part of the driver (`workers.driver.local_cluster`); on Ray it is an
actor (`workers.ray.host`). It forwards agents' events, and treats an agent that fails as lost.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from polytrain.errors import FailureKind
from polytrain.events.driver import DriverEvent
from polytrain.policy.links import FailedLink
from polytrain.policy.placement import NodeAddress
from polytrain.workers.agents.agent import Agent
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import AgentCall, AgentEvent, RankAssignment
from polytrain.workers.agents.kept_copies import Room
from polytrain.workers.agents.node_checks import StorageCheck
from polytrain.workers.agents.sent_copies import Neighbour, Piece, Whole
from polytrain.workers.processes.loop_thread import in_daemon_thread
from polytrain.workers.processes.zygote_connection import has_ended
from polytrain.workers.session.job import JobMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReady:
    """An agent is ready for a rank."""

    place: NodeAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A method of an agent has raised; nothing else reports that."""

    reason: str


Mail = AgentEvent | AgentReady | Broken
"""What an agent's host sends to the driver."""


class AgentHost:
    """The agents of one node. All its methods run on the event loop."""

    def __init__(
        self,
        spec: AgentSpec,
        job: bytes,
        place: NodeAddress,
        variables: Mapping[str, str],
        *,
        tell: Callable[[int, Mail], None],
        is_driver: bool = False,
    ) -> None:
        """
        Args:
            job: the pickled job of their worker processes.
            variables: environment variables of worker processes here; those of an agent override
                them.
            tell: called with an agent's number and its mail.
            is_driver: whether this is the driver's process, which has written to the run's storage.
        """
        self._spec = spec
        self._place = place
        self._variables = variables
        self._tell = tell
        self._job_memory = JobMemory(job)
        self._storage_check = (
            None if is_driver else StorageCheck(spec.store.location, spec.marker, host=place.host)
        )
        self._room = Room()
        self._agents: dict[int, Agent] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._zygotes: list[subprocess.Popen[bytes]] = []
        """Zygotes of agents that have ended. Other agents may still use them."""

    def start(
        self, numbers: Sequence[int], variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start agents of these numbers.

        Args:
            variables: environment variables of their worker processes, besides the host's.
        """
        for number in numbers:
            agent = self._agents[number] = Agent(
                self._spec,
                self._place,
                {**self._variables, **variables},
                self._job_memory,
                self._storage_check,
                self._room,
                emit=partial(self._emit, number),
            )
            starting = self._watched(number, self._place_agent(number, agent))
            self._starting[number] = asyncio.get_running_loop().create_task(starting)

    async def call(self, call: AgentCall, assignments: Mapping[int, RankAssignment | None]) -> None:
        """Have agents carry out a call; skip agents that have ended.

        Args:
            assignments: number of each agent → its new rank; None if it keeps its own.
        """
        await asyncio.gather(
            *(
                self._watched(number, agent.carry_out(call, assignment))
                for number, assignment in assignments.items()
                if (agent := self._agents.get(number)) is not None
            )
        )

    def meet(self, neighbours: Mapping[int, Neighbour | None]) -> None:
        """Say to which agents on other hosts agents, by their numbers, send copies of states."""
        for number, neighbour in neighbours.items():
            if (agent := self._agents.get(number)) is not None:
                agent.left.meet(neighbour)

    async def keep(self, number: int, sent: Piece | Whole) -> None:
        """Have an agent keep what one on another host sends; see `LeftStates.keep`.

        Raises:
            ConnectionError: it has ended.
            Exception: see `Neighbour`.
        """
        if number not in self._agents:
            raise ConnectionError("the agent has ended")
        await self._agents[number].left.keep(sent)

    async def end(self, number: int) -> None:
        """End an agent, and release its resources."""
        agent = self._agents.pop(number, None)
        if agent is not None:
            self._starting.pop(number).cancel()
            started = await agent.end()
            if started is not None:
                self._zygotes.append(started)

    async def end_all(self) -> None:
        """End all agents, and wait for the zygotes that they started."""
        await asyncio.gather(*map(self.end, list(self._agents)), return_exceptions=True)
        self._job_memory.close()
        for zygote in self._zygotes:
            if not await in_daemon_thread(has_ended, zygote, else_here=True):
                logger.warning("The zygote, process %d, is still in use, or hangs", zygote.pid)

    def _emit(self, number: int, event: AgentEvent) -> None:
        # What an agent says while it ends concerns nobody.
        if number in self._agents:
            self._tell(number, event)

    async def _place_agent(self, number: int, agent: Agent) -> None:
        self._tell(number, AgentReady(place=await agent.place()))

    async def _watched(self, number: int, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # any error makes the agent unusable
            self._tell(number, Broken(reason=f"{type(error).__name__}: {error}"))


@dataclass(slots=True, eq=False, kw_only=True)
class AgentHandle:
    """The driver's handle of one agent, from its request on."""

    number: int
    """The agent's number in the run."""

    bundle: int | None
    """The agent's bundle in the placement group; None outside the group."""

    place: NodeAddress = field(default_factory=lambda: NodeAddress(node_id="", host=""))
    """The agent's node, once it has arrived."""

    assigned: tuple[int, int] | None = None
    """The rank that it was assigned, and the world size."""

    is_fetching: bool = False
    """Whether it was asked, without a rank, to fetch what all agents share."""

    is_gone: bool = False
    """Whether it is lost or was dismissed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An agent has arrived."""

    agent_handle: AgentHandle
    place: NodeAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent is lost, or could not be started."""

    agent_handle: AgentHandle
    kind: FailureKind
    reason: str
    node: str | None = None
    """The node that had been chosen for it; None if that isn't known."""

    node_may_return: bool = False
    """Whether its node is only silent: the launcher uses that again once it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksTried:
    """Nodes have tried to connect to each other."""

    failed: tuple[FailedLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReturned:
    """A node answers again that was silent."""

    node_id: str


PoolEvent = Arrived | Gone | LinksTried | NodeReturned
"""An event for the pool of agents."""

Delivery = Sequence[AgentEvent | DriverEvent | PoolEvent]
"""Events that are sent together to the driver."""


def for_driver(agent_handle: AgentHandle, mail: Mail) -> AgentEvent | Arrived | Gone:
    """Return the event of an agent's mail, with the driver's handle of the agent."""
    match mail:
        case AgentReady(place=place):
            return Arrived(agent_handle=agent_handle, place=place)
        case Broken(reason=reason):
            return Gone(agent_handle=agent_handle, kind=FailureKind.AGENT_LOST, reason=reason)
        case _:
            return mail
