"""Hosts agents in a Ray actor, which ends with its node."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from polytrain.policy.placement import NodeAddress
from polytrain.ray_api.private import allow_blocking_get
from polytrain.workers.agents.agent_host import AgentHost, Mail
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.node_checks import ipv4_interfaces, on_network
from polytrain.workers.agents.sent_copies import Piece, Whole
from polytrain.workers.ray.links import LinkEnd, Listening


def _started_with() -> set[str]:
    """Return the variables that the node, the Ray job or the run has set in this process."""
    started = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {os.fsdecode(each.partition(b"=")[0]) for each in started}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNeighbour:
    """A `Neighbour` in another host's actor."""

    actor: Any
    number: int
    """The agent's number."""

    rank: int

    async def keep(self, sent: Piece | Whole) -> None:
        """See `Neighbour`."""
        try:
            await self.actor.keep.remote(self.number, sent)
        except RayTaskError as error:
            # Its text is the whole traceback.
            raise error.cause from None
        except RayError as error:
            raise ConnectionError(str(error)) from error


class RayHost(AgentHost):
    """The actor that hosts agents. Its methods run on the actor's event loop."""

    def __init__(self, spec: AgentSpec, job: bytes, numbers: Sequence[int]) -> None:
        """
        Args:
            job: the pickled job of their worker processes.
            numbers: numbers of its first agents.
        """
        context = ray.get_runtime_context()
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        place = on_network(
            NodeAddress(node_id=context.get_node_id(), host=host),
            spec.network,
            ipv4_interfaces() if spec.network is not None else {},
        )
        self._numbers = numbers
        if "working_dir" in context.runtime_env:
            # Ray has started this process in it, whether the run or the job has asked for it.
            spec = replace(spec, directory=os.getcwd())
        # In each actor Ray sets OMP_NUM_THREADS, to 1 in those that reserve no CPUs, as this one.
        environment, users = spec.zygote.environment, _started_with()
        not_the_users = {k: v for k, v in environment.items() if k not in users}
        variables = {**not_the_users, **spec.zygote.variables}
        spec = replace(spec, zygote=replace(spec.zygote, variables=variables))
        self._mail: asyncio.Queue[tuple[int, Mail]] = asyncio.Queue()
        super().__init__(
            spec,
            job,
            place,
            # Ray calls in the training function then connect to the same cluster.
            {"RAY_ADDRESS": context.gcs_address},
            tell=lambda number, mail: self._mail.put_nowait((number, mail)),
        )
        self._link_end = LinkEnd(place.host, spec.ports)
        allow_blocking_get()

    async def place(self) -> NodeAddress:
        """Return the node, once the first agents are starting."""
        self._end_with_raylet()
        self.start(self._numbers)
        return self._place

    async def listen(self) -> Listening:
        """Listen for trial connections; see `LinkEnd`."""
        return self._link_end.listen()

    async def reach(self, others: Sequence[Listening], timeout_s: float) -> list[str]:
        """Try to connect to other nodes; see `LinkEnd`."""
        return await asyncio.to_thread(self._link_end.reach, others, timeout_s)

    async def stop_listening(self) -> None:
        """Close the port for trial connections."""
        self._link_end.stop_listening()

    async def events(self) -> AsyncIterator[list[tuple[int, Mail]]]:
        """Yield the agents' mail with their numbers; several at once if they are ready."""
        while True:
            batch = [await self._mail.get()]
            while not self._mail.empty():
                batch.append(self._mail.get_nowait())
            yield batch

    def _end_with_raylet(self) -> None:
        """End with the raylet: Ray ends it seconds later, when other agents have the ranks."""
        raylet = os.getppid()
        with contextlib.suppress(OSError):
            if Path(f"/proc/{raylet}/comm").read_text() == "raylet\n":
                ended = os.pidfd_open(raylet)
                asyncio.get_running_loop().add_reader(ended, os._exit, 1)
