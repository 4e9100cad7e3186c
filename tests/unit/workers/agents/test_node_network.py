"""Which address a node offers on the network that the user has chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polytrain.policy.placement import NodeAddress
from polytrain.workers.agents.node_checks import ipv4_interfaces, on_network

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"], "ens5": ["192.0.2.9", "10.1.4.7"]}

PLACE = NodeAddress(node_id="n", host="10.0.0.7")


@pytest.mark.parametrize(
    ("network", "interface", "host"),
    [
        ("ens5", "ens5", "192.0.2.9"),
        ("10.1.0.0/16", "ens5", "10.1.4.7"),
        ("eth0", "eth0", "10.0.0.7"),
    ],
)
def test_a_node_has_its_address_there(network: str, interface: str, host: str) -> None:
    assert on_network(PLACE, network, INTERFACES) == replace(PLACE, host=host, interface=interface)


def test_without_a_choice_it_is_the_clusters_address() -> None:
    assert on_network(PLACE, None, INTERFACES) == PLACE


@pytest.mark.parametrize("network", ["eth1", "10.2.0.0/16", "eth"])
def test_a_node_without_it_is_named_with_the_interfaces_that_it_has(network: str) -> None:
    reason = on_network(PLACE, network, INTERFACES).unusable
    assert reason is not None
    assert "the node 10.0.0.7 has no" in reason
    assert f"network_interface={network!r}" in reason
    assert "lo (127.0.0.1), eth0 (10.0.0.7), ens5 (192.0.2.9, 10.1.4.7)" in reason


def test_this_host_has_a_loopback_interface() -> None:
    assert "127.0.0.1" in ipv4_interfaces()["lo"]
