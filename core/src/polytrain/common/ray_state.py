"""What a Ray that this process is connected to knows of its nodes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

import ray


def death_of_node(node_id: str) -> str | None:
    """Why a node is gone, in Ray's words; None if it isn't."""
    for node in _nodes():
        if node["NodeID"] == node_id and not node["Alive"]:
            return str(node.get("DeathReasonMessage") or "Ray doesn't say why")
    return None


def is_reachable(node_id: str, timeout_s: float = 2.0) -> bool:
    """Whether anybody listens where a node's raylet did. Ray itself takes seconds to be sure.

    Args:
        node_id: which.
        timeout_s: seconds after which nobody does.
    """
    for node in _nodes():
        if node["NodeID"] == node_id:
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            with contextlib.suppress(OSError), socket.create_connection(address, timeout_s):
                return True
    return False


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Living nodes, with their resources in all."""
    return {node["NodeID"]: node["Resources"] for node in _nodes() if node["Alive"]}


def free_nodes() -> dict[str, Mapping[str, float]]:
    """Living nodes, with the resources that nobody uses now."""
    free: dict[str, Mapping[str, float]] = _state().available_resources_per_node()
    return free


def autoscaler_totals() -> Mapping[str, float] | None:
    """What the cluster has at its largest, over all nodes; None if nobody makes it larger."""
    totals: Mapping[str, float] | None = _state().get_max_resources_from_cluster_config()
    return totals


def draining_nodes() -> frozenset[str]:
    """Nodes that are about to be taken away: the autoscaler, or a cloud's notice, has said so."""
    return frozenset(_state().get_draining_nodes())


def free_resources() -> Mapping[str, float]:
    """What nobody uses now, over all nodes."""
    free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


def _state() -> Any:
    # Ray's libraries ask here too: there is no public name for it.
    from ray._private.state import state

    return state


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes
