"""Where loaders say that a loop is about to get its next batch, for who keeps the state there."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Protocol


class Listener(Protocol):
    """Who hears of it."""

    def before_batch(self, frame: FrameType | None) -> None:
        """A loop is about to get its next batch; `frame` is its own, or that of what it calls."""

    def epoch_is_over(self) -> None:
        """There was no batch left."""


listener: Listener | None = None


def next_batch() -> None:
    """Say that a generator, which calls this, is about to fetch a batch for its caller."""
    if listener is not None:
        listener.before_batch(sys._getframe(1).f_back)


def epoch_is_over() -> None:
    """Say that there was no batch left."""
    if listener is not None:
        listener.epoch_is_over()
