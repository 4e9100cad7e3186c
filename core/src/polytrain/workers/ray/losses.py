"""Why an actor of Ray is lost: from Ray's error, and from what Ray knows of its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from polytrain.config.runtime_env import cause_of, named
from polytrain.errors import FailureKind
from polytrain.policy.placement import NodeAddress
from polytrain.ray_api.state import death_of_node, is_reachable


def why_gone(
    error: RayError, place: NodeAddress | None, runtime_env: Mapping[str, Any]
) -> tuple[FailureKind, str]:
    """Return the kind of the loss, and the reason in words.

    Args:
        error: the error of a call of the actor.
        place: its node; None if it hasn't arrived.
        runtime_env: the runtime environment in its request; empty if it has the job's.
    """
    if isinstance(error, RayTaskError):
        return FailureKind.AGENT_LOST, f"{type(error.cause).__name__}: {error.cause}"
    death = death_of_node(place.node_id) if place is not None else None
    if getattr(error, "preempted", False):
        return FailureKind.PREEMPTED, f"its node was preempted ({death or 'as announced'})"
    if place is not None and death is not None:
        return FailureKind.NODE_LOST, f"its node {place.host} is gone ({death})"
    # Ray reports the loss of the actor before it has confirmed that the node is gone.
    if place is not None and not is_reachable(place.node_id):
        return FailureKind.NODE_LOST, f"its node {place.host} is gone (its raylet is)"
    if place is not None and isinstance(error, ActorUnavailableError):
        return FailureKind.AGENT_LOST, "its agent can't be reached any more"
    if isinstance(error, RuntimeEnvSetupError):
        # The runtime environment fails alike on every node.
        cause = cause_of(error.error_message)
        which = named(runtime_env) if runtime_env else "the runtime_env of the Ray job"
        return FailureKind.STARTUP, f"{which} can't be set up: {cause}"
    detail = _detail(str(error))
    if isinstance(error, OutOfMemoryError):
        return FailureKind.OUT_OF_MEMORY, f"Ray has ended its agent to free memory ({detail})"
    return FailureKind.AGENT_LOST, f"its agent has died ({detail})"


def _detail(text: str) -> str:
    """Return Ray's message without its general advice."""
    detail = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    first_lines = [line.strip() for line in (detail or text).splitlines() if line.strip()]
    return first_lines[0] if first_lines else "Ray doesn't say why"
