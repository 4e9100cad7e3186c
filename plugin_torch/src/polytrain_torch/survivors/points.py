"""Where loaders and optimizers say how far a loop is, for who keeps the state there."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Protocol
from weakref import WeakSet

import torch

averaging_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers that average gradients over all ranks themselves, without DDP."""


class Listener(Protocol):
    """Who hears of it."""

    def before_batch(self, frame: FrameType | None) -> None:
        """A loop is about to get its next batch; `frame` is its own, or that of what it calls."""

    def has_batch(self) -> None:
        """The loop gets a batch."""

    def epoch_is_over(self) -> None:
        """There was no batch left."""

    def after_forward(self) -> None:
        """A model has computed its output, and its gradients are about to be averaged."""


listener: Listener | None = None


def next_batch() -> None:
    """Say that a generator, which calls this, is about to fetch a batch for its caller."""
    if listener is not None:
        listener.before_batch(sys._getframe(1).f_back)


def has_batch() -> None:
    """Say that there was a batch."""
    if listener is not None:
        listener.has_batch()


def epoch_is_over() -> None:
    """Say that there was no batch left."""
    if listener is not None:
        listener.epoch_is_over()


def before_average() -> None:
    """Say that one of `averaging_optimizers` is about to average gradients."""
    if listener is not None:
        listener.after_forward()
