"""The network interfaces of this host."""

from __future__ import annotations

import socket


def ipv4_interfaces() -> dict[str, list[str]]:
    """Return each interface's IPv4 addresses; interfaces without one are left out."""
    # Import it late: few runs need it.
    import psutil

    found = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}
