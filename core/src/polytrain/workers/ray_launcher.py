"""Agents on Ray: one actor each. A thread of the driver listens to each."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polytrain.common.errors import FailureKind
from polytrain.common.placement import NodeAddress
from polytrain.common.ray_state import death_of_node, is_reachable
from polytrain.workers.agent import AgentSpec
from polytrain.workers.agent_handle import AgentHandle, Arrived, Delivery, Gone
from polytrain.workers.ray_agent import RayAgent

logger = logging.getLogger(__name__)

_AgentActor = ray.remote(RayAgent)

_NODE_ID_LABEL = "ray.io/node-id"


@dataclass(slots=True, kw_only=True)
class RayAgentLauncher:
    """Asks Ray for agents, and ends them. What they tell goes to one mailbox."""

    spec: AgentSpec
    resources: Mapping[str, float]
    """Of one agent."""

    spread: bool
    """Whether agents outside of bundles are rather to be on different nodes."""

    mailbox: queue.SimpleQueue[Delivery]
    _bundles: PlacementGroup | None = None
    _actors: dict[AgentHandle, Any] = field(default_factory=dict)
    _listeners: list[threading.Thread] = field(default_factory=list)

    def reserve(self, bundles: int, strategy: str) -> None:
        """Have room for so many agents, all of it or none."""
        self._bundles = placement_group([dict(self.resources)] * bundles, strategy=strategy)

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        """Ask for an agent; it arrives, or is gone, some time later.

        Args:
            bundle: of what was reserved; None for any place.
            avoid: nodes on which it mustn't be, if it is in no bundle.
        """
        resources = dict(self.resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
        }
        if bundle is not None:
            assert self._bundles is not None
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._bundles, placement_group_bundle_index=bundle
            )
        elif self.spread:
            options["scheduling_strategy"] = "SPREAD"
        if bundle is None and avoid:
            options["label_selector"] = {_NODE_ID_LABEL: f"!in({','.join(sorted(avoid))})"}
        actor = _AgentActor.options(**options).remote(self.spec)
        agent_handle = AgentHandle(
            call=lambda method, *arguments: getattr(actor, method).remote(*arguments),
            bundle=bundle,
        )
        self._actors[agent_handle] = actor
        listener = threading.Thread(
            target=self._listen, args=(agent_handle, actor), name="polytrain-agent", daemon=True
        )
        self._listeners.append(listener)
        listener.start()
        return agent_handle

    def dismiss(self, agent_handle: AgentHandle) -> None:
        """End an agent."""
        ray.kill(self._actors[agent_handle])

    def close(self, timeout_s: float, *, here: Sequence[AgentHandle]) -> None:
        """End all agents, and give back what they hold.

        Args:
            timeout_s: seconds to wait for Ray to confirm it.
            here: the agents that are there.
        """
        released = [agent_handle.call("release") for agent_handle in here]
        if released:
            ray.wait(released, num_returns=len(released), timeout=timeout_s)
        for agent_handle in self._actors:
            self.dismiss(agent_handle)
        # Killed is not gone: what they hold is free once their streams have broken off.
        deadline = time.monotonic() + timeout_s
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        if self._bundles is not None:
            remove_placement_group(self._bundles)
        if any(listener.is_alive() for listener in self._listeners):
            logger.warning("Ray has not confirmed the end of all agents; they were killed.")

    def _listen(self, agent_handle: AgentHandle, actor: Any) -> None:
        """Pass on what an agent tells, until it is gone."""
        place: NodeAddress | None = None
        try:
            place = ray.get(actor.place.remote())
            self.mailbox.put((Arrived(agent_handle=agent_handle, place=place),))
            for reference in actor.events.options(num_returns="streaming").remote():
                self.mailbox.put(ray.get(reference))
        except RayError as error:
            kind, reason = _why_gone(error, place)
            if isinstance(error, ActorUnavailableError):
                # Should it still be there: nobody listens to it any more.
                self.dismiss(agent_handle)
        else:
            kind, reason = FailureKind.AGENT_LOST, "its agent has ended"
        self.mailbox.put((Gone(agent_handle=agent_handle, kind=kind, reason=reason),))


def _why_gone(error: RayError, place: NodeAddress | None) -> tuple[FailureKind, str]:
    if isinstance(error, RayTaskError):
        return FailureKind.AGENT_LOST, f"{type(error.cause).__name__}: {error.cause}"
    death = death_of_node(place.node_id) if place is not None else None
    if getattr(error, "preempted", False):
        return FailureKind.PREEMPTED, f"its node was preempted ({death or 'as announced'})"
    if place is not None and death is not None:
        return FailureKind.NODE_LOST, f"its node {place.host} is gone ({death})"
    if place is not None and isinstance(error, ActorUnavailableError):
        # Which is told before Ray is sure that a node is gone.
        if not is_reachable(place.node_id):
            return FailureKind.NODE_LOST, f"its node {place.host} is gone (its raylet is)"
        return FailureKind.AGENT_LOST, "its agent can't be reached any more"
    if isinstance(error, RuntimeEnvSetupError):
        return FailureKind.AGENT_LOST, f"its runtime_env can't be set up: {error.error_message}"
    detail = _detail(str(error))
    if isinstance(error, OutOfMemoryError):
        return FailureKind.OUT_OF_MEMORY, f"Ray has ended its agent to free memory ({detail})"
    return FailureKind.AGENT_LOST, f"its agent has died ({detail})"


def _detail(text: str) -> str:
    """Ray's own words, without what it says of every death."""
    told = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    first_lines = [line.strip() for line in (told or text).splitlines() if line.strip()]
    return first_lines[0] if first_lines else "Ray doesn't say why"
