"""Makes many calls of a storage concurrently: each waits for the disk or the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_CALLS = 16
"""Maximum concurrent calls."""


_SMALL = 1 << 20
"""Files below this size in bytes are handled concurrently."""


def small_at_once(call: Callable[[Item], Answer], sizes: Mapping[Item, int]) -> dict[Item, Answer]:
    """Return the answers to a call with each file, by file. Only small ones are concurrent.

    A large one alone takes all of a disk's or a network's bandwidth, and training needs the CPUs
    that would hash several.

    Args:
        call: handles one file.
        sizes: file → its bytes.
    """
    small = [file for file, size in sizes.items() if size < _SMALL]
    answers = dict(zip(small, at_once(call, small), strict=True))
    return {file: answers[file] if file in answers else call(file) for file in sizes}


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
