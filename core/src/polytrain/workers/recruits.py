"""Agents as the driver sees them: asked for, arrived, lost. One thread listens to each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polytrain.errors import FailureKind
from polytrain.workers.agent import Agent, AgentSpec
from polytrain.workers.cluster import death_of_node, is_reachable
from polytrain.workers.group import Happening
from polytrain.workers.placement import Place

_AgentActor = ray.remote(Agent)

_NODE_ID_LABEL = "ray.io/node-id"


@dataclass(slots=True, eq=False, kw_only=True)
class Recruit:
    """One agent, from the moment it is asked for."""

    actor: Any
    bundle: int | None
    """Its bundle of the placement group; None outside of it."""

    place: Place = field(default_factory=lambda: Place(node_id="", host=""))
    """Where it is, once it has arrived."""

    seat: tuple[int, int] | None = None
    """The rank that it was prepared for, and of how many."""

    is_gone: bool = False
    """Whether it is lost, or was sent away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An agent is there."""

    recruit: Recruit
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent is lost, or never came to be."""

    recruit: Recruit
    kind: FailureKind
    reason: str


Delivery = Sequence[Happening | Arrived | Gone]
"""What is told at once; nothing, only to wake the reader."""


@dataclass(slots=True, kw_only=True)
class Recruiter:
    """Asks Ray for agents, and ends them. What they tell goes to one mailbox."""

    spec: AgentSpec
    resources: Mapping[str, float]
    """Of one agent."""

    spread: bool
    """Whether agents outside of bundles are rather to be on different nodes."""

    mailbox: queue.SimpleQueue[Delivery]
    _bundles: PlacementGroup | None = None
    _asked_for: list[Recruit] = field(default_factory=list)
    _listeners: list[threading.Thread] = field(default_factory=list)

    def reserve(self, bundles: int, strategy: str) -> None:
        """Have room for so many agents, all of it or none."""
        self._bundles = placement_group([dict(self.resources)] * bundles, strategy=strategy)

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> Recruit:
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
        recruit = Recruit(actor=_AgentActor.options(**options).remote(self.spec), bundle=bundle)
        self._asked_for.append(recruit)
        listener = threading.Thread(
            target=self._listen, args=(recruit,), name="polytrain-agent", daemon=True
        )
        self._listeners.append(listener)
        listener.start()
        return recruit

    def dismiss(self, recruit: Recruit) -> None:
        """End an agent."""
        ray.kill(recruit.actor)

    def close(self, timeout_s: float) -> bool:
        """End all agents; whether Ray has confirmed it.

        Args:
            timeout_s: seconds to wait for that.
        """
        for recruit in self._asked_for:
            self.dismiss(recruit)
        # Killed is not gone: what they hold is free once their streams have broken off.
        deadline = time.monotonic() + timeout_s
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        if self._bundles is not None:
            remove_placement_group(self._bundles)
        return not any(listener.is_alive() for listener in self._listeners)

    def _listen(self, recruit: Recruit) -> None:
        """Pass on what an agent tells, until it is gone."""
        place: Place | None = None
        try:
            place = ray.get(recruit.actor.place.remote())
            self.mailbox.put((Arrived(recruit=recruit, place=place),))
            for reference in recruit.actor.events.options(num_returns="streaming").remote():
                self.mailbox.put(ray.get(reference))
        except RayError as error:
            kind, reason = _why_gone(error, place)
            if isinstance(error, ActorUnavailableError):
                # Should it still be there: nobody listens to it any more.
                self.dismiss(recruit)
        else:
            kind, reason = FailureKind.AGENT_LOST, "its agent has ended"
        self.mailbox.put((Gone(recruit=recruit, kind=kind, reason=reason),))


def _why_gone(error: RayError, place: Place | None) -> tuple[FailureKind, str]:
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
    detail = _detail(str(error))
    if isinstance(error, OutOfMemoryError):
        return FailureKind.OUT_OF_MEMORY, f"Ray has ended its agent to free memory ({detail})"
    return FailureKind.AGENT_LOST, f"its agent has died ({detail})"


def _detail(text: str) -> str:
    """Ray's own words, without what it says of every death."""
    told = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    first_lines = [line.strip() for line in (told or text).splitlines() if line.strip()]
    return first_lines[0] if first_lines else "Ray doesn't say why"
