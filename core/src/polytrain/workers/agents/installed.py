"""Which versions of distributions a node has, and which of them differ from the driver's."""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
from collections.abc import Iterable, Mapping
from importlib import metadata

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
