"""Virtual workers: parts of each global batch that are the same for every number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn


def virtual_workers_of(count: int, world_size: int, rank: int) -> range:
    """Return the virtual workers that a rank stands for: consecutive ones, at least one.

    Args:
        count: number of virtual workers, at least `world_size`.
        world_size: number of ranks.
        rank: the rank.
    """
    return range(count * rank // world_size, count * (rank + 1) // world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One virtual worker's part of a global batch."""

    virtual_worker: int
    """0 … virtual_workers - 1."""

    content: Any
    """What a loop without virtual workers gets as its batch."""

    weight: float = 1.0
    """Its share of the global batch's rows, times the number of virtual workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualBatch:
    """A rank's part of a global batch, as micro-batches that a backend's own loop yields.

    It can't be iterated over or indexed: a loop that takes it for a batch raises an error.
    """

    micro_batches: tuple[MicroBatch, ...]
    """Those of this rank's virtual workers, from the last to the first. So what a loop over them
    leaves in its variables on rank 0 is virtual worker 0's, at any number of ranks."""

    place: str
    """Its place in the run's data, from which random numbers are seeded: the same after a
    restart."""

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __getitem__(self, _: Any) -> Any:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        return True

    def _refuse(self) -> NoReturn:
        raise TypeError(
            "With ScalingConfig(virtual_workers=…), a loader's batch has a micro-batch for each of "
            "this worker's virtual workers. Run forward and backward in a loop over them, and step "
            "after it: `for batch in loader:`, and in it `for x, y in micro_batches(batch):` (from "
            "polytrain.torch import micro_batches)."
        )
