"""Nodes that Ray is about to take away, as a run gets notice of them."""

from __future__ import annotations

import queue
from collections.abc import Mapping

import pytest

from polytrain.events.notices import LeavingNode
from polytrain.workers.ray import cluster


def test_a_node_is_reported_once_and_again_if_it_goes_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[dict[str, int | None]] = [
        {"a": 9},
        {"a": 9},
        {"a": 12},
        {"a": 9, "b": None},
        {"a": 4, "b": None},
        {"b": 7},
    ]
    monkeypatch.setattr(cluster, "_LOOK_S", 0.001)
    monkeypatch.setattr(
        cluster, "draining_nodes", lambda: looks.pop(0) if len(looks) > 1 else looks[0]
    )
    monkeypatch.setattr(cluster, "node_addresses", lambda: {"a": "10.0.0.1", "b": "10.0.0.2"})
    reported: queue.Queue[Mapping[str, LeavingNode]] = queue.Queue()
    watch = cluster.NodeWatch(reported.put)
    try:
        notices = [reported.get(timeout=60) for _ in range(4)]
    finally:
        watch.close()
        watch._thread.join(timeout=60)
    assert notices == [
        {"a": LeavingNode(address="10.0.0.1", deadline_ms=9)},
        {"b": LeavingNode(address="10.0.0.2")},
        {"a": LeavingNode(address="10.0.0.1", deadline_ms=4)},
        {"b": LeavingNode(address="10.0.0.2", deadline_ms=7)},
    ]
