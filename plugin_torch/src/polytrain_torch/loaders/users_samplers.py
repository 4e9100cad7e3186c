"""Looks into samplers of users and libraries: what they know, and how to set their epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class SetEpoch:
    """Wraps a sampler's `set_epoch`: calls it in each epoch unless the training function does."""

    def __init__(self, own: Callable[[int], Any]) -> None:
        self._own = own
        self._is_called = False
        self.passes = 0
        """Number of epochs that were drawn from the sampler."""

    def __call__(self, epoch: int) -> None:
        self._is_called = True
        self._own(epoch)

    def begin(self, epoch: int) -> None:
        """Set the epoch that is about to be drawn, unless the training function has set one."""
        if not self._is_called:
            self._own(epoch)


def let_set_epoch(sampler: Any) -> None:
    """Let scripts call `set_epoch`, as on a `DistributedSampler`, or leave the call out."""
    for each in samplers_in(sampler):
        own = getattr(each, "set_epoch", _ignore_epoch)
        if not isinstance(own, SetEpoch):
            with contextlib.suppress(AttributeError):  # a list, or a class with slots
                each.set_epoch = SetEpoch(own)


def passes_before(sampler: Any, epoch: int) -> range:
    """Return the epochs that a sampler has yet to be drawn from before this one, after a restart.

    It may keep something from one to the next, such as a list that it shuffles in place. torch's
    own don't, and one without a length may be endless.
    """
    kinds = {type(each).__module__.partition(".")[0] for each in samplers_in(sampler)}
    set_epoch = getattr(sampler, "set_epoch", None)
    if kinds <= {"torch", "polytrain_torch"} or not has_length(sampler):
        return range(0)
    if not isinstance(set_epoch, SetEpoch):  # a list, or a class with slots
        return range(0)
    before, set_epoch.passes = range(set_epoch.passes, epoch), epoch + 1
    return before


def _ignore_epoch(epoch: int) -> None:
    pass


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers inside it."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return found


def knows_rank(sampler: Any) -> bool:
    """Whether a sampler yields only this rank's items, as `DistributedSampler` does."""
    return any(hasattr(each, name) for each in samplers_in(sampler) for name in _RANK_NAMES)


_RANK_NAMES = ("num_replicas", "rank", "process_index")
"""Attributes of samplers, of torch and other libraries, that know their rank."""


def has_length(sampler: Any) -> bool:
    """Whether a sampler knows its number of items; then they are drawn at once."""
    try:
        len(sampler)
    except TypeError:
        return False
    return True


def length_of(sampler: Any) -> int:
    """Return a sampler's number of items.

    Raises:
        TypeError: it doesn't know it.
    """
    try:
        return len(sampler)
    except TypeError as error:
        raise TypeError(
            f"{type(sampler).__qualname__} has no __len__, so the number of batches of an epoch "
            "isn't known. Define __len__ in the sampler, or don't ask for the loader's length "
            "(Lightning needs it)."
        ) from error
