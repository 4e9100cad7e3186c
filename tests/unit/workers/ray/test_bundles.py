"""Where Ray has placed the bundles of a run's agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray")

from polytrain.workers.ray import bundles
from polytrain.workers.ray.bundles import AgentBundles

Table = dict[str, dict[str, Any]]


@dataclass(eq=False)
class Group:
    """A placement group that a run has requested."""

    name: str
    count: int
    freed: list[str]
    group: Mock = field(default_factory=Mock)

    def __post_init__(self) -> None:
        self.group.id = self.name.encode()

    def free(self) -> None:
        self.freed.append(self.name)


@pytest.fixture
def groups() -> list[Group]:
    """The groups that were requested."""
    return []


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, groups: list[Group]) -> Table:
    """Ray's table of groups, for a test to fill in; the nodes b and d live."""
    found: Table = {}
    freed: list[str] = []

    def requested(name: str, resources: object, count: int, *_: object, **__: object) -> Group:
        groups.append(Group(name, count, freed))
        return groups[-1]

    monkeypatch.setattr(bundles, "Guard", lambda name: None)
    monkeypatch.setattr(bundles, "Reservation", requested)
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
    table: Table,
    groups: list[Group],
    state: str,
    nodes: dict[int, str],
    expected: dict[int, str],
) -> None:
    own = AgentBundles(resources={"CPU": 1})
    own.reserve(2, "SPREAD")
    own.request(7, bundle=0, avoid=())
    own.request(8, bundle=1, avoid=())
    say(table, groups[0], state, nodes)
    assert own.placed([7, 8]) == expected
    own.shun("b")
    assert own.placed([7, 8]) == {n: node for n, node in expected.items() if node != "b"}


def test_a_bundle_moves_back_only_if_it_has_no_room_itself(
    table: Table, groups: list[Group]
) -> None:
    """Ray looks for other room for another bundle of its group."""
    own = AgentBundles(resources={"CPU": 1})
    own.reserve(2, "SPREAD")
    own.move([0, 1], "SPREAD", ())
    own.request(7, bundle=0, avoid=())
    own.request(8, bundle=1, avoid=())
    say(table, groups[0], "CREATED", {0: "b", 1: "d"})
    say(table, groups[1], "RESCHEDULING", {0: "b", 1: ""})
    assert own.placed([7, 8]) == {7: "b"}
    assert own.move_back([0, 1]) == {1}
    assert groups[1].freed == []


def test_what_no_longer_waits_asks_for_no_room(table: Table, groups: list[Group]) -> None:
    """One of two lost nodes is back: the other's bundle is placed once there is room for one."""
    own = AgentBundles(resources={"CPU": 1})
    own.reserve(2, "SPREAD")
    first = groups[0]
    own.move([0, 1], "SPREAD", ())
    say(table, first, "CREATED", {0: "b", 1: "c"})
    say(table, groups[1], "PENDING", {})
    # Agents of both are requested anew.
    assert own.move_back([0]) == {0, 1}
    assert groups[1].freed == [groups[1].name]
    assert [each.count for each in groups] == [2, 2, 1]
    own.request(7, bundle=0, avoid=())
    own.request(8, bundle=1, avoid=())
    say(table, groups[2], "CREATED", {0: "d"})
    assert own.placed([7, 8]) == {7: "b", 8: "d"}


def test_room_that_a_bundle_comes_back_from_is_used_by_the_next_that_moves(
    table: Table, groups: list[Group]
) -> None:
    own = AgentBundles(resources={"CPU": 1})
    own.reserve(2, "SPREAD")
    own.move([0, 1], "SPREAD", ())
    say(table, groups[0], "CREATED", {0: "b", 1: "b"})
    say(table, groups[1], "RESCHEDULING", {0: "", 1: "b"})
    assert own.move_back([0]) == {0}
    say(table, groups[1], "CREATED", {0: "d", 1: "b"})
    own.move([0], "SPREAD", ["b"])
    own.request(7, bundle=0, avoid=())
    assert own.placed([7]) == {7: "d"}
    assert len(groups) == 2


def say(table: Table, group: Group, state: str, nodes: dict[int, str]) -> None:
    """Have Ray's table say where the bundles of a group are."""
    table[group.group.id.hex()] = {"state": state, "bundles_to_node_id": nodes}
