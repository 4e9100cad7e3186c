"""Sums of CPU tensors over the ranks of one node, in memory that they share.

The ranks write into slots of their own, each adds up its part of all slots in the order of ranks,
and all read the parts: a reduce-scatter and an all-gather, as in Rabenseifner's all-reduce
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005). So every rank gets the same bits, and in the same order whenever the run is repeated.

Whoever waits for a rank that has died waits until it is ended itself, which its agent does, or
until its time is up.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from typing import Final

import torch

_SLOT: Final = 1 << 20
"""Bytes: larger tensors go in pieces, which stay in the cache of a core from write to sum."""

_LINE: Final = 64
"""Bytes of a rank's counters: no two ranks' are in one cache line."""

_SPIN_S: Final = 2e-4
"""So long a wait asks again at once. A longer one is not to look like work to whoever watches."""

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 0.05

_HALVES: Final = 2
"""One is written while slower ranks still read the other."""


def can_share_memory() -> bool:
    """Whether what one core writes is seen by the others in the order in which it was written."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedSums:
    """One rank's side. All ranks make the same calls in the same order."""

    def __init__(self, memory: mmap.mmap, *, rank: int, world_size: int, timeout_s: float) -> None:
        """
        Args:
            memory: the same on all ranks, of `size_for(world_size)` bytes, with zeros at first.
            rank: this one.
            world_size: ranks.
            timeout_s: seconds that one waits for another.
        """
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        words = memoryview(memory)[: world_size * _LINE].cast("Q")
        self._counters, *self._meant = (words[n :: _LINE // 8] for n in range(1 + _HALVES))
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=world_size * _LINE).view(
            _HALVES, world_size, _SLOT
        )
        self._half = 0
        self._meetings = 0

    def add_up(self, tensor: torch.Tensor) -> None:
        """Put the sum of all ranks' tensors in the place of each.

        Args:
            tensor: of any shape; floating-point, on the CPU, contiguous.

        Raises:
            RuntimeError: if another rank's has another size.
            TimeoutError: if another rank didn't come.
        """
        meant = tensor.nbytes
        for piece in tensor.detach().view(-1).split(_SLOT // tensor.element_size()):
            length = piece.numel()
            slots = [
                slot[: length * piece.element_size()].view(piece.dtype) for slot in self._next()
            ]
            slots[self._rank].copy_(piece)
            self._meet(meant)
            begin, end = (length * n // self._world_size for n in (self._rank, self._rank + 1))
            total = slots[0][begin:end]
            for slot in slots[1:]:
                total += slot[begin:end]
            self._meet(meant)
            piece.copy_(slots[0])

    def send(self, tensor: torch.Tensor, *, source: int) -> None:
        """Put one rank's tensor in the place of all others'.

        Args:
            tensor: of any shape and type; on the CPU, contiguous.
            source: the rank whose it is.

        Raises:
            RuntimeError: if another rank's has another size.
            TimeoutError: if another rank didn't come.
        """
        meant = tensor.nbytes
        for piece in tensor.detach().view(-1).view(torch.uint8).split(_SLOT):
            slot = self._next()[source][: len(piece)]
            if source == self._rank:
                slot.copy_(piece)
            self._meet(meant)
            if source != self._rank:
                piece.copy_(slot)

    def _next(self) -> torch.Tensor:
        """The ranks' slots in the half that nobody reads: for that, all would have met since."""
        self._half = 1 - self._half
        return self._slots[self._half]

    def _meet(self, meant: int) -> None:
        """Wait for all, who mean a tensor of the same size."""
        self._meetings += 1
        # Who is ahead by one meeting writes what it means to the other half.
        everybodys = self._meant[self._meetings % _HALVES]
        everybodys[self._rank] = meant
        self._counters[self._rank] = self._meetings
        for rank in range(self._world_size):
            self._await(rank)
            if everybodys[rank] != meant:
                raise RuntimeError(
                    f"rank {self._rank} gives a tensor of {meant} bytes where rank {rank} gives "
                    f"one of {everybodys[rank]}: all ranks must train the same model, in the same "
                    "steps."
                )

    def _await(self, rank: int) -> None:
        if self._counters[rank] >= self._meetings:
            return
        began = time.perf_counter()
        while self._counters[rank] < self._meetings:
            waited = time.perf_counter() - began
            if waited < _SPIN_S:
                os.sched_yield()
            elif waited < self._timeout_s:
                time.sleep(min(max(waited / 4, _SHORTEST_NAP_S), _LONGEST_NAP_S))
            else:
                raise TimeoutError(
                    f"rank {self._rank} has waited {self._timeout_s:g} s for rank {rank} to add up "
                    "gradients, or send weights: all ranks must prepare the same models, and take "
                    "the same number of steps. If a step takes longer than that, raise timeout_s "
                    "in the backend's options."
                )


def size_for(world_size: int) -> int:
    """Bytes of memory that so many ranks need."""
    return world_size * (_LINE + _HALVES * _SLOT)
