"""Compares what is installed on a node with what the driver has. Pure."""

from __future__ import annotations

from collections.abc import Mapping


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
