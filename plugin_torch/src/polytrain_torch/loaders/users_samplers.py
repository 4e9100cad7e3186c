"""Looks into samplers of users and libraries: what they know, and how to set their epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from polytrain_torch.randomness import generators_of
from polytrain_torch.survivors.snapshots import Snapshot


class SetEpoch:
    """Wraps a sampler's `set_epoch`: calls it in each epoch unless the training function does."""

    def __init__(self, own: Callable[[int], Any]) -> None:
        self.own = own
        self.asked: int | None = None
        """The epoch that the training function has set."""

        self.passes = Passes()

    def __call__(self, epoch: int) -> None:
        self.asked = epoch
        self.own(epoch)

    def begin(self, epoch: int) -> None:
        """Set the epoch that is about to be drawn, unless the training function has set one."""
        if self.asked is None:
            self.own(epoch)


class Passes:
    """Finds out whether a pass over a sampler changes it, such as a list that it shuffles in place.

    An epoch's order then depends on the epochs before, and a restart has to draw these again.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The first epoch that was drawn, if that has changed the sampler."""

        self._was_drawn = False
        self._before: tuple[Snapshot, Any] | None = None

    def to_repeat(self, epoch: int) -> range:
        """Return the epochs to draw again before this one is drawn, after a restart."""
        if self._was_drawn or self.first is None:
            return range(0)
        return range(self.first, epoch)

    def begin(self, sampler: Any) -> None:
        """Look at a sampler before it is drawn from for the first time."""
        if not self._was_drawn and self.first is None:
            self._before = _look_at(sampler)
        self._was_drawn = True

    def end(self, sampler: Any, epoch: int) -> None:
        """Look at a sampler from which a whole epoch was drawn."""
        before, self._before = self._before, None
        if before is None:
            return
        then, it = before
        now, same = _look_at(sampler)
        if not then.equals(it, now, same):
            self.first = epoch


def _look_at(sampler: Any) -> tuple[Snapshot, Any]:
    # Generators of its own are seeded for each epoch.
    seeded = [each for inner in samplers_in(sampler) for each in generators_of(inner)]
    snapshot = Snapshot(seeded, ())
    reference = snapshot.add(sampler)
    snapshot.take()
    return snapshot, reference


def let_set_epoch(sampler: Any) -> None:
    """Let scripts call `set_epoch`, as on a `DistributedSampler`, or leave the call out."""
    for each in samplers_in(sampler):
        own = getattr(each, "set_epoch", _ignore_epoch)
        if not isinstance(own, SetEpoch):
            with contextlib.suppress(AttributeError):  # a list, or a class with slots
                each.set_epoch = SetEpoch(own)


def passes_of(sampler: Any) -> Passes | None:
    """Return the passes over a sampler that may change in them; None if it surely doesn't.

    Samplers of torch and Accelerate don't, and one without a length may be endless.
    """
    kinds = {type(each).__module__.partition(".")[0] for each in samplers_in(sampler)}
    set_epoch = getattr(sampler, "set_epoch", None)
    # A list, or a class with slots, has no wrapper.
    if kinds <= _UNCHANGED or not has_length(sampler) or not isinstance(set_epoch, SetEpoch):
        return None
    return set_epoch.passes


_UNCHANGED = {"torch", "accelerate", "polytrain_torch"}
"""Packages whose samplers make each epoch's order anew."""


def set_epochs_in(sampler: Any) -> list[SetEpoch]:
    """Return the wrappers of `set_epoch` of a sampler and those inside it."""
    found = [getattr(each, "set_epoch", None) for each in samplers_in(sampler)]
    return [each for each in found if isinstance(each, SetEpoch)]


def _ignore_epoch(epoch: int) -> None:
    pass


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers inside it."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        inside = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inside is None else inside
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
