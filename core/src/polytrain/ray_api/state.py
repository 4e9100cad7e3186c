"""The nodes and resources of the Ray that this process is connected to."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

import ray

from polytrain.ray_api.private import cluster_state


def death_of_node(node_id: str) -> str | None:
    """Why a node is gone, in Ray's words; None if it isn't."""
    for node in _nodes():
        if node["NodeID"] == node_id and not node["Alive"]:
            return str(node.get("DeathReasonMessage") or "Ray doesn't say why")
    return None


def is_reachable(node_id: str, timeout_s: float = 2.0) -> bool:
    """Whether a process listens on the port of a node's raylet. Ray takes seconds to detect that.

    Args:
        node_id: the node.
        timeout_s: seconds after which the answer is no.
    """
    for node in _nodes():
        if node["NodeID"] == node_id:
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            with contextlib.suppress(OSError), socket.create_connection(address, timeout_s):
                return True
    return False


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Living nodes, with their total resources."""
    return {node["NodeID"]: node["Resources"] for node in _nodes() if node["Alive"]}


def node_labels() -> dict[str, Mapping[str, str]]:
    """Living nodes, with their labels."""
    return {node["NodeID"]: node["Labels"] for node in _nodes() if node["Alive"]}


def free_nodes() -> dict[str, Mapping[str, float]]:
    """Living nodes, with their free resources."""
    free: dict[str, Mapping[str, float]] = cluster_state().available_resources_per_node()
    return free


def autoscaler_totals() -> Mapping[str, float] | None:
    """Resources of the cluster at its largest, over all nodes; None without an autoscaler."""
    totals: Mapping[str, float] | None = cluster_state().get_max_resources_from_cluster_config()
    return totals


def draining_nodes() -> frozenset[str]:
    """Nodes that the autoscaler, or a notice of the cloud, has marked for removal."""
    return frozenset(cluster_state().get_draining_nodes())


def free_resources() -> Mapping[str, float]:
    """Free resources, over all nodes."""
    free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes
