"""Makes many calls of a storage concurrently: each waits for the disk or the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_CALLS = 16
"""Maximum concurrent calls."""


def at_once(call: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """Yield the answers to a call with each item, in their order; the first error is raised.

    A single call is made in this thread.
    """
    items = list(items)
    if len(items) < 2:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(min(len(items), _CALLS), "polytrain-storage") as threads:
        yield from threads.map(call, items)
