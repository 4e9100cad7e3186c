"""Checks whether a node can have workers: its storage, its versions, and its network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import platform
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from polytrain.config.listening import address_on
from polytrain.policy.placement import NodeAddress
from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import is_temporary
from polytrain.storage.location import Location, refusal

_SEEN_WITHIN_S = 5.0
"""Seconds within which a network file system shows a new file."""

_REACHED_WITHIN_S = 30.0
"""Seconds for which a storage that the driver has just written to is tried again."""

_PAUSE_S = 0.1


class StorageCheck:
    """The check of one node. Agents that need it at the same time share it; later ones repeat it.

    It runs on an event loop, and the storage is used in a thread.
    """

    def __init__(self, location: Location, marker: str, *, host: str) -> None:
        self._arguments = location, marker, host
        self._running: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Return the problem of the run's storage on this node; None if there is none."""
        if self._running is None or self._running.done():
            check = asyncio.to_thread(storage_problem, *self._arguments)
            self._running = asyncio.get_running_loop().create_task(check)
        # An agent that ends doesn't cancel it for the others.
        return await asyncio.shield(self._running)


def storage_problem(location: Location, marker: str, host: str) -> str | None:
    """Return the problem of the run's storage on this node; None if there is none.

    Args:
        marker: the path in it of a file that the driver has written.
    """
    # The driver waits for this node, and a temporary error looks like that of a wrong server.
    location = replace(location, retry_s=min(location.retry_s, _REACHED_WITHIN_S))
    # Only a path can mean another storage here.
    unseen = _unseen(location, marker, host) if location.is_local else None
    if unseen is not None:
        return unseen
    refused = refusal(location)
    return None if refused is None else f"the node {host} {refused.what}. {refused.remedy}"


def _unseen(location: Location, marker: str, host: str) -> str | None:
    """Return why this node doesn't see the driver's file; None if it does."""
    began, files = time.monotonic(), Beneath(Path(location.address))
    while (error := _error_of(files, marker)) is not None:
        is_unseen = isinstance(error, FileNotFoundError)
        limit_s = _SEEN_WITHIN_S if is_unseen else location.retry_s * is_temporary(error)
        if time.monotonic() - began <= limit_s:
            time.sleep(_PAUSE_S)
        elif is_unseen:
            return (
                f"the node {host} doesn't see the run's directory {location.address}, which the "
                "driver has made. Set RunConfig.storage_path to a directory that all nodes mount, "
                "or to object storage such as s3://bucket"
            )
        else:
            return f"the node {host} can't read the run's directory {location.address}: {error}"
    return None


def _error_of(files: Beneath, marker: str) -> OSError | None:
    try:
        files.status(marker)
    except OSError as error:
        return error
    return None


_LOCK = threading.Lock()


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those of these distributions that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        # `xgboost` and `tensorflow` are also modules of distributions without support for GPUs.
        for distribution in (f"{name}-cpu", name):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(distribution)
    return found


def versions_unlike(driver: Mapping[str, str]) -> tuple[str, ...]:
    """Return which of the driver's distributions have another version here, with both versions.

    Reading a version takes some milliseconds: all agents of a process share the result.
    """
    if not driver:
        return ()
    with _LOCK:
        return _compared(tuple(driver.items()))


@functools.cache
def _compared(driver: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    names = [name for name, _ in driver if name != "python"]
    return other_versions(installed_versions(names), dict(driver))


def other_versions(node: Mapping[str, str], driver: Mapping[str, str]) -> tuple[str, ...]:
    """Return the distributions that differ, each with both versions, sorted.

    Builds of one version, such as "2.1+cpu" and "2.1+cu126", don't differ.
    """
    return tuple(
        f"{name} {node.get(name, 'missing')} (driver: {driver.get(name, 'missing')})"
        for name in sorted(node.keys() | driver.keys())
        if _version(node, name) != _version(driver, name)
    )


def _version(versions: Mapping[str, str], name: str) -> str:
    return versions.get(name, "").partition("+")[0]


def warnings_of_versions(others: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the warnings about nodes with other versions, one for all with the same ones.

    Args:
        others: address of a node → what `other_versions` says of it.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for host, differ in others.items():
        if differ:
            alike.setdefault(differ, []).append(host)
    return [
        f"Other versions on {', '.join(sorted(hosts))}: {', '.join(differ)}. Training may fail "
        "there, or give other results. Install the same versions on every node."
        for differ, hosts in alike.items()
    ]


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
