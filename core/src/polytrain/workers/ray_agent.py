"""An agent in an actor of Ray's, which ends with its node."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import ray

from polytrain.common.placement import NodeAddress
from polytrain.data.streams.ray_pipeline import allow_blocking_get
from polytrain.workers.agent import Agent, AgentSpec


class RayAgent(Agent):
    """The actor."""

    def __init__(self, spec: AgentSpec) -> None:
        context = ray.get_runtime_context()
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        super().__init__(
            spec,
            NodeAddress(node_id=context.get_node_id(), host=host),
            # Inside a training function the first Ray call connects to the same cluster.
            {"RAY_ADDRESS": context.gcs_address},
        )
        allow_blocking_get()

    async def place(self) -> NodeAddress:
        """Be ready for a rank, and say where this is."""
        self._end_with_raylet()
        return await super().place()

    def _end_with_raylet(self) -> None:
        """Don't outlive the node: Ray notices many seconds later, when others have taken over."""
        raylet = os.getppid()
        with contextlib.suppress(OSError):
            if Path(f"/proc/{raylet}/comm").read_text() == "raylet\n":
                ended = os.pidfd_open(raylet)
                asyncio.get_running_loop().add_reader(ended, os._exit, 1)
