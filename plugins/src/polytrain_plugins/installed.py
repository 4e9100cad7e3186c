"""What is installed: entry points, and commands that install what is missing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_Directory = tuple[str, int]
"""A directory, and the time at which something was last added to it or removed."""


def installed_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of this group, of the distributions on `sys.path`."""
    return _read(group, tuple(_directories()))


@lru_cache(maxsize=8)
def _read(group: str, directories: tuple[_Directory, ...]) -> tuple[EntryPoint, ...]:
    return tuple(_read_all(directories).select(group=group))


@lru_cache(maxsize=1)
def _read_all(directories: tuple[_Directory, ...]) -> Any:  # Python 3.11 has a type of its own
    """Read them once: one group takes as long as all."""
    return entry_points()


def _directories() -> Iterator[_Directory]:
    for name in sys.path:
        directory = os.path.abspath(name)
        try:
            yield directory, os.stat(directory).st_mtime_ns
        except OSError:
            yield directory, 0


def install_command(command: str) -> str:
    """Return a command that works here.

    Args:
        command: as for the released distribution, such as `pip install 'polytrain[torch]'`.
    """
    checkout = _checkout()
    return command if checkout is None else command.replace("'polytrain[", f"'{checkout}[")


@lru_cache(maxsize=1)
def _checkout() -> str | None:
    """The directory that this distribution was installed from; None if from an index."""
    try:
        # PEP 610: written by every installer.
        recorded = distribution("polytrain-plugins").read_text("direct_url.json")
        url = urlsplit(json.loads(recorded or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError):
        return None
    root = Path(unquote(url.path)).parent
    is_checkout = url.scheme == "file" and (root / ".ci" / "hatch_metadata.py").is_file()
    return str(root) if is_checkout else None
