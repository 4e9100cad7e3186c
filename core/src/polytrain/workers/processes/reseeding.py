"""Seeds random number generators in forks, which inherit the states of all that are there."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

_unseeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
"""Generators that imports have made without a seed. Python seeds its own one in forks."""


@contextlib.contextmanager
def noting_generators() -> Iterator[None]:
    """Note the generators that imports make meanwhile without a seed.

    With one of its own, a library names files that no other process may have. Generators that have
    a seed go on alike in all processes.
    """
    seed = random.Random.seed

    def noting_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, a, version)
        if a is None:
            _unseeded.add(self)
        else:
            _unseeded.discard(self)

    of_all: Any = random.Random
    of_all.seed = noting_seed
    try:
        yield
    finally:
        of_all.seed = seed


def reseed() -> None:
    """Seed the generators of NumPy and torch, and those that were noted."""
    for generator in _unseeded:
        generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # Not torch.seed(), which prepares CUDA. A module that failed to import has no generator.
    of_torch = getattr(sys.modules.get("torch"), "default_generator", None)
    if of_torch is not None:
        of_torch.seed()
