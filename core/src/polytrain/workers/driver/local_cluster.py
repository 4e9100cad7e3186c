"""Uses this machine as a cluster, without importing Ray: agents are objects of the driver."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polytrain.config.configs import ScalingConfig
from polytrain.events.notices import LeavingNode
from polytrain.functions.pickling import THIS_MACHINE
from polytrain.linux.machine_resources import machine_resources, visible_gpus
from polytrain.policy.placement import NodeAddress
from polytrain.policy.scaling import worker_capacity
from polytrain.workers.agents.agent_host import AgentHandle, AgentHost, Mail, for_driver
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import AgentCall, OpenedBytes, RankAssignment, StreamOrder
from polytrain.workers.driver.group import AgentLauncher, Bundles, Mailbox
from polytrain.workers.processes.loop_thread import LoopThread

if TYPE_CHECKING:
    import pyarrow as pa

    from polytrain.data.shards.assignment import RunDataset


logger = logging.getLogger(__name__)


class LocalCluster:
    """A `Cluster` of one node, whose agents are objects in this process."""

    reference_type: tuple[type, ...] = ()
    """Validation has refused data sets that refer to Ray objects."""

    def __init__(self) -> None:
        self.node_id = socket.gethostname()
        self.variables: Mapping[str, str] = {}
        self._resources = machine_resources(os.environ)

    def living_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return this machine's total resources."""
        return {self.node_id: self._resources}

    def free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return the total resources: what other programs use is unknown."""
        return self.living_nodes()

    def launcher(
        self,
        spec: AgentSpec,
        job: bytes,
        scaling: ScalingConfig,
        mailbox: Mailbox,
    ) -> LocalAgentLauncher:
        """Return the launcher of agents."""
        return LocalAgentLauncher(
            spec,
            job,
            place=NodeAddress(node_id=self.node_id, host=THIS_MACHINE),
            most=worker_capacity([self._resources], scaling.resources).workers,
            gpus=visible_gpus(os.environ),
            gpus_per_agent=scaling.gpus_per_worker,
            mailbox=mailbox,
        )

    def share(self, content: pa.Buffer) -> LocalMemory:
        """Put bytes into memory once, for all agents."""
        # Import it late: importing Arrow takes a while, and only runs with data share bytes.
        from polytrain.data.shards.shared_memory import bytes_to_shared_memory

        return LocalMemory(descriptor=bytes_to_shared_memory(memoryview(content)))

    def streams(self, datasets: Sequence[RunDataset], held: Mapping[str, float]) -> Nothing:
        """Return nothing: validation has refused streaming data sets."""
        return Nothing()

    def watch(self, tell: Callable[[Mapping[str, LeavingNode]], None]) -> Nothing:
        """Watch nothing: this machine isn't drained."""
        return Nothing()


class Nothing:
    """A watch without events, and a stream source without data sets."""

    def start(self) -> tuple[StreamOrder, ...]:
        """Start nothing."""
        return ()

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMemory:
    """Shared memory of this process."""

    descriptor: int

    def open(self) -> OpenedBytes:
        """Open the memory for one agent's worker processes."""
        return OpenedBytes(descriptor=os.dup(self.descriptor), extent=None, kept=None)

    def fetch(self) -> None:
        """Do nothing: the memory is on this node."""

    def close(self) -> None:
        """Free the memory once no agent uses it."""
        os.close(self.descriptor)


class LocalAgentLauncher(AgentLauncher):
    """Starts agents, as many as the machine has room for, and ends them."""

    bundles = Bundles()

    def __init__(
        self,
        spec: AgentSpec,
        job: bytes,
        *,
        place: NodeAddress,
        most: int,
        gpus: Sequence[str] = (),
        gpus_per_agent: int = 0,
        mailbox: Mailbox,
    ) -> None:
        """
        Args:
            job: the pickled job of their worker processes.
            place: the node's address.
            most: maximum number of agents; further ones wait until others end.
            gpus: names of this machine's GPUs.
            gpus_per_agent: number of GPUs for each agent's worker processes.
            mailbox: receives the agents' events.
        """
        self._place = place
        self._most = most
        self._mailbox = mailbox
        self._host = AgentHost(spec, job, place, {}, tell=self._deliver, is_driver=True)
        self._numbers = itertools.count()
        self._handles: dict[int, AgentHandle] = {}
        """The handles of started agents, by number."""

        self._free_gpus = deque(gpus)
        self._gpus_per_agent = gpus_per_agent
        self._gpus: dict[int, list[str]] = {}
        """The GPUs of each started agent, by its number."""

        self._waiting: deque[AgentHandle] = deque()
        self._loop = LoopThread("polytrain-agents")

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        """Request an agent, which arrives once there is room for it."""
        agent_handle = AgentHandle(number=next(self._numbers), bundle=bundle)
        if self._place.node_id not in avoid:
            self._waiting.append(agent_handle)
            self._start_those_with_room()
        return agent_handle

    def call(
        self, call: AgentCall, assignments: Mapping[AgentHandle, RankAssignment | None]
    ) -> None:
        """Send a call to agents; see `AgentLauncher.call`."""
        by_number = {each.number: assignment for each, assignment in assignments.items()}
        self._loop.submit(self._host.call(call, by_number))

    def dismiss(self, agent_handle: AgentHandle) -> None:
        """End an agent."""
        self._waiting = deque(each for each in self._waiting if each is not agent_handle)
        if self._handles.pop(agent_handle.number, None) is not None:
            # Append its GPUs, to reuse them last: its process may still hold their memory.
            self._free_gpus.extend(self._gpus.pop(agent_handle.number))
            self._loop.submit(self._host.end(agent_handle.number))
        self._start_those_with_room()

    def close(self, timeout_s: float) -> None:
        """End all agents, and release their resources."""
        self._waiting.clear()
        try:
            self._loop.submit(self._host.end_all()).result(timeout_s)
        except TimeoutError:
            logger.warning("The worker processes' resources could not all be released in time.")
        self._loop.close()

    def _start_those_with_room(self) -> None:
        while self._waiting and len(self._handles) < self._most:
            agent_handle = self._waiting.popleft()
            self._handles[agent_handle.number] = agent_handle
            gpus = [self._free_gpus.popleft() for _ in range(self._gpus_per_agent)]
            self._gpus[agent_handle.number] = gpus
            variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            self._loop.call(self._host.start, [agent_handle.number], variables)

    def _deliver(self, number: int, mail: Mail) -> None:
        agent_handle = self._handles.get(number)
        if agent_handle is not None:
            self._mailbox.put((for_driver(agent_handle, mail),))
