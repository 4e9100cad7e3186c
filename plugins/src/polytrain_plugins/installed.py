"""The entry points of installed distributions, read again only after an installation.

Reading the metadata of all distributions takes longer than all else that precedes a small run, and
a search fits hundreds of times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

_Directory = tuple[str, int]
"""A directory, and the time at which something was last added to it or removed."""


def installed_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of this group, of the distributions on `sys.path`."""
    return _read(group, tuple(_directories()))


@lru_cache(maxsize=8)
def _read(group: str, directories: tuple[_Directory, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _directories() -> Iterator[_Directory]:
    for name in sys.path:
        directory = os.path.abspath(name)
        try:
            yield directory, os.stat(directory).st_mtime_ns
        except OSError:
            yield directory, 0
