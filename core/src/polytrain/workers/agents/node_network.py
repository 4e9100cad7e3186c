"""A node's address on the network that the user has chosen for the ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polytrain.config.listening import address_on
from polytrain.policy.placement import NodeAddress


def on_network(
    place: NodeAddress, network: str | None, interfaces: Mapping[str, Sequence[str]]
) -> NodeAddress:
    """Return a node with its address on a network, or with the reason that it has none there.

    Args:
        place: the node, with the address by which the cluster knows it.
        network: the user's `RunConfig.network_interface`; None for that address.
        interfaces: the IPv4 addresses of each of the node's interfaces.
    """
    if network is None:
        return place
    found = address_on(network, interfaces)
    if found is not None:
        interface, host = found
        return replace(place, host=host, interface=interface)
    has = ", ".join(f"{name} ({', '.join(each)})" for name, each in interfaces.items()) or "none"
    what = "address in" if "/" in network else "interface with an IPv4 address named"
    return replace(
        place,
        unusable=f"the node {place.host} has no {what} {network}, which "
        f"RunConfig(network_interface={network!r}) names; it has: {has}. If the names differ among "
        'nodes, give their subnet, such as network_interface="10.1.0.0/16"',
    )


def ipv4_interfaces() -> dict[str, list[str]]:
    """Return each interface's IPv4 addresses; interfaces without one are left out."""
    # Import it late: few runs need it.
    import psutil

    found = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}
