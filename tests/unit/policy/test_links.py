"""Which connections between nodes are tried."""

from __future__ import annotations

from collections import Counter

import pytest

from polytrain.policy.links import ALL_UP_TO, FailedLink, described, remedy_for, targets


@pytest.mark.parametrize("count", [0, 1, 2, 5, ALL_UP_TO])
def test_of_a_few_nodes_each_two_are_tried_both_ways(count: int) -> None:
    found = targets(count)
    assert {(a, b) for a, others in enumerate(found) for b in others} == {
        (a, b) for a in range(count) for b in range(count) if a != b
    }
    assert sum(map(len, found)) == count * (count - 1)


@pytest.mark.parametrize("count", [17, 64, 100, 1000])
def test_of_many_nodes_each_connects_to_a_few_and_as_many_connect_to_it(count: int) -> None:
    found = targets(count)
    each = count.bit_length() - (count & (count - 1) == 0)
    assert {len(set(others)) for others in found} == {each}
    assert set(Counter(other for others in found for other in others).values()) == {each}
    assert all(node not in others for node, others in enumerate(found))
    # All of them hang together, so a cluster that is cut in two is noticed.
    reached, new = {0}, {0}
    while new:
        new = {other for node in new for other in found[node]} - reached
        reached |= new
    assert len(reached) == count


def test_failed_connections_are_named_with_their_direction() -> None:
    failed = [FailedLink(source="a", target=target, reason="refused") for target in "bcdefg"]
    text = described([*failed[:1], FailedLink(source="b", target="b", reason="no such address")])
    assert text == ("a can't connect to b (refused); b can't listen there (no such address)")
    assert described(failed).endswith("; and 2 more")
    assert "connect to b, c, d, e over TCP, " in remedy_for(failed)
