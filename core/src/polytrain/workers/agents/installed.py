"""Reads which versions of distributions are installed here."""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
from collections.abc import Iterable, Mapping
from importlib import metadata

from polytrain.policy.versions import other_versions

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
