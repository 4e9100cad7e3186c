"""Which rank goes where: node by node, the driver's first."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from polytrain.policy.placement import NodeAddress, members, rank_order


def place(node: str) -> NodeAddress:
    return NodeAddress(node_id=node, host=f"host of {node}")


places = st.lists(st.sampled_from("abcd").map(place), min_size=1, max_size=12)


@given(places=places, first=st.sampled_from("abcde"))
def test_ranks_of_a_node_are_next_to_each_other(places: list[NodeAddress], first: str) -> None:
    order = rank_order(places, first)
    assert sorted(order) == list(range(len(places)))
    nodes = [node for node, _ in groupby(places[index].node_id for index in order)]
    assert len(nodes) == len(set(nodes))
    if any(place.node_id == first for place in places):
        assert nodes[0] == first


@given(places=places, first=st.sampled_from("abcde"))
def test_everybody_knows_its_place_on_its_node(places: list[NodeAddress], first: str) -> None:
    ordered = [places[index] for index in rank_order(places, first)]
    everybody = members(ordered, cpus=3, gpus=1)
    assert [member.rank for member in everybody] == list(range(len(places)))
    assert {member.world_size for member in everybody} == {len(places)}
    assert {member.node_count for member in everybody} == {len({p.node_id for p in places})}
    on_node: dict[int, list[int]] = {}
    for member, its_place in zip(everybody, ordered, strict=True):
        assert member.host == its_place.host
        is_alone = member.node_count == 1
        assert member.listen_host == ("127.0.0.1" if is_alone else its_place.host)
        assert (member.cpus, member.gpus) == (3, 1)
        on_node.setdefault(member.node_rank, []).append(member.local_rank)
        on_same = sum(other.node_id == its_place.node_id for other in places)
        assert member.local_world_size == on_same
    assert sorted(on_node) == list(range(len(on_node)))
    assert all(ranks == list(range(len(ranks))) for ranks in on_node.values())


def test_two_nodes_of_two() -> None:
    order = rank_order([place("b"), place("a"), place("b"), place("a")], "a")
    assert order == [1, 3, 0, 2]


def test_workers_elsewhere_keep_the_order_of_their_nodes() -> None:
    assert rank_order([place("c"), place("b"), place("c")], "driver") == [0, 2, 1]
