"""Calls outside the collective, on another thread: XGBoost's communicator is per thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol


class Outside(Protocol):
    """Makes a call outside the collective, and waits for it."""

    def __call__(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the call's result, or raise its error."""


@contextmanager
def outside_the_collective() -> Iterator[Outside]:
    """Yield a function that makes calls on one other thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="outside-the-collective") as thread:
        yield lambda call, *args, **kwargs: thread.submit(call, *args, **kwargs).result()
