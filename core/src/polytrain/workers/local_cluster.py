"""This machine as a cluster, without importing Ray."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polytrain.config.configs import ScalingConfig
from polytrain.policy.scaling import largest_fit
from polytrain.workers.agent import AgentSpec
from polytrain.workers.agent_handle import Delivery
from polytrain.workers.local_launcher import LocalAgentLauncher
from polytrain.workers.machine_resources import machine_resources, visible_gpus
from polytrain.workers.placement import NodeAddress
from polytrain.workers.shared_store import OpenShared

if TYPE_CHECKING:
    import pyarrow as pa


class LocalCluster:
    """A `Cluster` of one node, whose agents are objects in this process."""

    reference_type: tuple[type, ...] = ()
    """Validation has refused data sets that refer to Ray objects."""

    def __init__(self) -> None:
        self.node_id = socket.gethostname()
        self._resources = machine_resources(os.environ)

    def living_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """This machine's total resources."""
        return {self.node_id: self._resources}

    def free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """The total resources: what other programs use is unknown."""
        return self.living_nodes()

    def launcher(
        self,
        spec: AgentSpec,
        job: bytes,
        scaling: ScalingConfig,
        mailbox: queue.SimpleQueue[Delivery],
    ) -> LocalAgentLauncher:
        """Return the launcher of agents."""
        return LocalAgentLauncher(
            spec,
            job,
            place=NodeAddress(node_id=self.node_id, host="127.0.0.1"),
            room=largest_fit([self._resources], scaling.resources).workers,
            gpus=visible_gpus(os.environ),
            gpus_per_agent=scaling.gpus_per_worker,
            mailbox=mailbox,
        )

    def share(self, content: pa.Buffer) -> LocalMemory:
        """Put bytes into memory once, for all agents."""
        # Importing Arrow takes a while, and only runs with data share any.
        from polytrain.data.shards.shared_memory import bytes_to_shared_memory

        return LocalMemory(descriptor=bytes_to_shared_memory(memoryview(content)))

    def watch(self, tell: Callable[[frozenset[str]], None]) -> Nothing:
        """Watch nothing: this machine isn't drained."""
        return Nothing()


class Nothing:
    """A watch without events."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMemory:
    """Shared memory of this process."""

    descriptor: int

    def open(self) -> OpenShared:
        """Open it for one agent's worker processes."""
        return OpenShared(descriptor=os.dup(self.descriptor))

    def close(self) -> None:
        """Free the memory once no agent uses it."""
        os.close(self.descriptor)
