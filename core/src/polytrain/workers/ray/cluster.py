"""Uses a Ray cluster for agents, and watches for draining nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayError

from polytrain.config.configs import ScalingConfig
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.shared_memory import Extent, bytes_to_shared_memory
from polytrain.events.notices import LeavingNode, sooner
from polytrain.policy.labels import allowed
from polytrain.ray_api import state as ray_state
from polytrain.ray_api.state import draining_nodes, node_addresses
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import OpenedBytes
from polytrain.workers.driver.group import Mailbox, StreamSource
from polytrain.workers.driver.local_cluster import Nothing
from polytrain.workers.ray.launcher import RayAgentLauncher

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Seconds between two requests. Nodes announce a drain at least half a minute ahead."""


class RayCluster:
    """A `Cluster` of Ray nodes. Ray must be initialised."""

    reference_type: type = ray.ObjectRef

    def __init__(self, label_selectors: Sequence[Mapping[str, str]] = ()) -> None:
        """
        Args:
            label_selectors: label selectors of the run's workers; empty for any node.
        """
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self._selectors = label_selectors

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables of the Ray job's runtime environment, which its driver doesn't get."""
        given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        # Ray replaces names of variables in them, too.
        return {name: os.path.expandvars(value) for name, value in given.items()}

    def living_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return the total resources of each node that may have workers."""
        return self._allowed(ray_state.living_nodes())

    def free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return the free resources of each node that may have workers."""
        return self._allowed(ray_state.free_nodes())

    def _allowed(
        self, nodes: Mapping[str, Mapping[str, float]]
    ) -> Mapping[str, Mapping[str, float]]:
        if not self._selectors:
            return nodes
        may_have = allowed(ray_state.node_labels(), self._selectors)
        return {node: resources for node, resources in nodes.items() if node in may_have}

    def launcher(
        self,
        spec: AgentSpec,
        job: bytes,
        scaling: ScalingConfig,
        mailbox: Mailbox,
    ) -> RayAgentLauncher:
        """Return the launcher of agents on Ray."""
        return RayAgentLauncher(
            spec=spec,
            job=job,
            resources=scaling.resources,
            labels=_per_bundle(scaling),
            spread=scaling.placement_strategy == "SPREAD",
            shares_hosts=scaling.standby == 0,
            mailbox=mailbox,
        )

    def share(self, content: pa.Buffer) -> RayMemory:
        """Put bytes where the agents of all nodes can read them."""
        # In a list, Ray doesn't fetch it before it is opened.
        return RayMemory(references=[ray.put(np.frombuffer(content, dtype=np.uint8))])

    def streams(self, datasets: Sequence[RunDataset], held: Mapping[str, float]) -> StreamSource:
        """Return the source that starts the streaming data sets of each attempt."""
        if all(dataset.source.stream is None for dataset in datasets):
            return Nothing()
        # Import it late: importing Ray Data takes a while.
        from polytrain.workers.ray.streams import Streams

        return Streams(datasets, held)

    def watch(self, tell: Callable[[Mapping[str, LeavingNode]], None]) -> NodeWatch:
        """Report draining nodes."""
        return NodeWatch(tell)


def _per_bundle(scaling: ScalingConfig) -> tuple[Mapping[str, str], ...]:
    """Return the label selectors in the form of `AgentBundles.labels`."""
    each = [scaling.label_selector_of(worker) for worker in range(scaling.max_workers)]
    return tuple(each) if len(scaling.label_selectors) > 1 else scaling.label_selectors


@dataclass(frozen=True, slots=True, kw_only=True)
class RayMemory:
    """Bytes in Ray's object store."""

    references: list[Any]

    def open(self) -> OpenedBytes:
        """Open the bytes in an agent."""
        array = self.fetch()
        descriptor, extent = _store_memory(array) or (
            bytes_to_shared_memory(memoryview(array)),
            None,
        )
        return OpenedBytes(descriptor=descriptor, extent=extent, kept=array)

    def fetch(self) -> Any:
        """Bring the bytes to the object store of this node."""
        # No time limit: they may be transferred from another node. The agent waits in another
        # thread, and ends its attempt on request.
        return ray.get(self.references[0])

    def close(self) -> None:
        """Do nothing: Ray counts the references."""


def _store_memory(array: np.ndarray[Any, Any]) -> tuple[int, Extent] | None:
    """Return the object store's memory behind an array; None if it can't be found.

    The store is an unnamed file that this process maps. The raylet, this process's parent, has it
    open, and a process of the same user can open it through `/proc`.
    """
    address = array.ctypes.data
    with open("/proc/self/maps", errors="replace") as maps:
        for line in maps:
            span, _, offset, device, inode, *_ = line.split()
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address and address + array.nbytes <= stop:
                break
        else:
            return None
    major, minor = (int(part, 16) for part in device.split(":"))
    file = (os.makedev(major, minor), int(inode))
    server = f"/proc/{os.getppid()}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(server):
            if _identity(f"{server}/{name}") == file:
                descriptor = os.open(f"{server}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                where = Extent(offset=int(offset, 16) + address - start, size=array.nbytes)
                return descriptor, where
    return None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # closed in the meantime
        return None
    return status.st_dev, status.st_ino


class NodeWatch:
    """Reports each draining node once, and again if it goes sooner, from its own thread.

    It polls every few seconds, because Ray doesn't send notices.
    """

    def __init__(self, tell: Callable[[Mapping[str, LeavingNode]], None]) -> None:
        """
        Args:
            tell: called with the nodes that weren't draining before, or go sooner, by node id.
        """
        self._tell = tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polytrain-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        # The thread takes longer only if Ray doesn't answer; its later notices are ignored.
        self._thread.join(_LOOK_S)

    def _watch(self) -> None:
        known: dict[str, int | None] = {}
        is_reported = False
        while not self._ended.wait(_LOOK_S):
            try:
                draining = draining_nodes()
                new = sooner(draining, known)
                addresses = node_addresses() if new else {}
            except (RayError, OSError, RuntimeError) as error:
                if not is_reported:
                    logger.warning("Ray doesn't list draining nodes now: %s", error)
                is_reported = True
                continue
            if new:
                self._tell(
                    {
                        node: LeavingNode(
                            address=addresses.get(node, node), deadline_ms=deadline_ms
                        )
                        for node, deadline_ms in new.items()
                    }
                )
            known |= new
