"""Calls that the other ranks take no part in: XGBoost's communicator belongs to one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol


class Outside(Protocol):
    """Makes a call outside the collective, and waits for it."""

    def __call__(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the call returns; what it raises is raised."""


@contextmanager
def outside_the_collective() -> Iterator[Outside]:
    """A thread of its own, which stays the same: so do the threads that XGBoost starts for it."""
    with ThreadPoolExecutor(1, thread_name_prefix="outside-the-collective") as thread:
        yield lambda call, *args, **kwargs: thread.submit(call, *args, **kwargs).result()
