"""Where Ray has placed the bundles of a run's agents."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")

from polytrain.workers.ray import bundles
from polytrain.workers.ray.bundles import AgentBundles

GROUP = Mock()
GROUP.group.id = b"group"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Ray's table of groups, for a test to fill in; the nodes b and d live."""
    found: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(bundles, "Guard", lambda name: None)
    monkeypatch.setattr(bundles, "Reservation", lambda *_, **__: GROUP)
    monkeypatch.setattr(bundles, "placement_group_table", lambda: found)
    monkeypatch.setattr(bundles, "living_nodes", lambda: {"b": {}, "d": {}})
    return found


@pytest.mark.parametrize(
    ("state", "nodes", "expected"),
    [
        ("PENDING", {}, {}),
        ("CREATED", {0: "b", 1: "d"}, {7: "b", 8: "d"}),
        ("CREATED", {0: "b", 1: "c"}, {7: "b"}),
        ("RESCHEDULING", {0: "b", 1: ""}, {7: "b"}),
    ],
)
def test_bundles_on_living_nodes_stay_while_ray_finds_other_room_for_the_rest(
    table: dict[str, dict[str, Any]], state: str, nodes: dict[int, str], expected: dict[int, str]
) -> None:
    own = AgentBundles(resources={"CPU": 1})
    own.reserve(2, "SPREAD")
    own.request(7, bundle=0, avoid=())
    own.request(8, bundle=1, avoid=())
    table[GROUP.group.id.hex()] = {"state": state, "bundles_to_node_id": nodes}
    assert own.placed([7, 8]) == expected
    own.shun("b")
    assert own.placed([7, 8]) == {n: node for n, node in expected.items() if node != "b"}
