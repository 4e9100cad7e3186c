"""The nodes and resources of the Ray that this process is connected to."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

import ray

from polytrain.ray_api.private import cluster_state

_ANSWERS_WITHIN_S = 2.0
"""Seconds after which a node counts as one that doesn't answer."""


def with_placement(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's options with where Ray places it, if an actor in a placement group starts it.

    By default it is in the same group. If that has only the actor's bundle, as that of most trials
    of Ray Tune, it would wait for ever for what the actor holds.
    """
    if "placement_group" in options or "scheduling_strategy" in options:
        return dict(options)
    group = ray.util.get_current_placement_group()
    if group is None or len(group.bundle_specs) > 1:
        return dict(options)
    return {**options, "scheduling_strategy": "DEFAULT"}


def death_of_node(node_id: str) -> str | None:
    """Return Ray's reason for a node's death; None if it isn't dead."""
    for node in _nodes():
        if node["NodeID"] == node_id and not node["Alive"]:
            return str(node.get("DeathReasonMessage") or "Ray doesn't say why")
    return None


def is_reachable(node_id: str) -> bool:
    """Return whether a node's raylet listens on its port. Ray takes seconds to detect its loss."""
    with (
        contextlib.suppress(OSError, LookupError),
        socket.create_connection(raylet_addresses()[node_id], _ANSWERS_WITHIN_S),
    ):
        return True
    return False


def is_refused(node_id: str) -> bool:
    """Return whether a node's host answers that its raylet has ended: it refuses connections."""
    try:
        socket.create_connection(raylet_addresses()[node_id], _ANSWERS_WITHIN_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, LookupError):
        pass
    return False


def raylet_addresses() -> dict[str, tuple[str, int]]:
    """Return where the raylets of all nodes listen, the dead ones too, by node id."""
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in _nodes()
    }


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Return the living nodes' total resources, by node id."""
    return {node["NodeID"]: node["Resources"] for node in _nodes() if node["Alive"]}


def node_labels() -> dict[str, Mapping[str, str]]:
    """Return the living nodes' labels, by node id."""
    return {node["NodeID"]: node["Labels"] for node in _nodes() if node["Alive"]}


def node_addresses() -> dict[str, str]:
    """Return the addresses of all nodes, the dead ones too, by node id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}


def free_nodes() -> dict[str, Mapping[str, float]]:
    """Return the living nodes' free resources, by node id."""
    free: dict[str, Mapping[str, float]] = cluster_state().available_resources_per_node()
    return free


def autoscaler_totals() -> Mapping[str, float] | None:
    """Return total resources of the cluster at its largest; None without an autoscaler."""
    totals: Mapping[str, float] | None = cluster_state().get_max_resources_from_cluster_config()
    return totals


def draining_nodes() -> dict[str, int | None]:
    """Return the nodes that the autoscaler or a cloud provider's notice has marked for removal.

    The values say when they go, in milliseconds since the epoch; None if nobody has said.
    """
    nodes: dict[str, int] = cluster_state().get_draining_nodes()
    return {node: deadline_ms or None for node, deadline_ms in nodes.items()}


def free_resources() -> Mapping[str, float]:
    """Return the free resources of all nodes together."""
    free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes
