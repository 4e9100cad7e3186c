"""All-reduce of CPU tensors over the ranks of one node, in shared memory.

Each rank writes into its own slots, sums its part of all slots, and reads the parts of all ranks: a
reduce-scatter and an all-gather, as in Rabenseifner's all-reduce (Thakur, Rabenseifner
and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). The sum is in the
order of ranks, or with virtual workers in that of `tree_sums`. So every rank gets the same bits,
also when the run is repeated.

The operations are generators that yield the seconds that they have waited: the caller may hand a
long wait to another thread. A rank that waits for a dead rank waits until its agent kills it, or
until the timeout.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Final

import torch

from polytrain_torch.collectives.tree_sums import add_subtrees, all_subtrees, subtrees

_SLOT: Final = 1 << 20
"""Bytes of a slot. Larger tensors are split into pieces that fit into a core's cache."""

_LINE: Final = 64
"""Bytes of a rank's counters: no two ranks share a cache line."""

_SPIN_S: Final = 2e-4
"""Seconds that a wait spins before it sleeps, so that it doesn't count as CPU work."""

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 0.05

_VOTE: Final = 1 << 63
"""A word with this bit is a vote; other operations write the tensor's size in bytes."""

_HALVES: Final = 2
"""Number of buffers: a fast rank writes one while slower ranks still read the other."""


def can_share_memory() -> bool:
    """Whether all cores see one core's writes in order: only on x86-64 Linux."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedSums:
    """One rank's side of the operations. All ranks make the same calls in the same order."""

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        virtual_workers: int | None = None,
    ) -> None:
        """
        Args:
            memory: memory shared by all ranks, initially zero, with the bytes that `size_for` says.
            world_size: number of ranks.
            timeout_s: maximum seconds to wait for another rank.
            virtual_workers: number of virtual workers, if sums are over these.
        """
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self.virtual_workers = virtual_workers
        words = memoryview(memory)[: world_size * _LINE].cast("Q")
        self._counters, *self._meant = (words[n :: _LINE // 8] for n in range(1 + _HALVES))
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=world_size * _LINE).view(
            _HALVES, _slots(world_size, virtual_workers), _SLOT
        )
        self._half = 0
        self._barriers = 0

    def add_up(self, *vectors: Sequence[torch.Tensor]) -> Iterator[float]:
        """Replace the first vector of each rank by the sum over all ranks' vectors.

        Args:
            vectors: vectors of one length, each the elements of contiguous CPU tensors of one
                floating-point type: one vector, or with virtual workers the sums of this rank's
                `tree_sums.subtrees`, from the first to the last.

        Raises:
            RuntimeError: another rank's vectors have a different size.
            TimeoutError: another rank doesn't call this in time.
        """
        meant = sum(each.nbytes for each in vectors[0])
        first = self._first_slot()
        for pieces in zip(*map(_pieces, vectors), strict=True):
            sizes = [len(part) for part in pieces[0]]
            length, dtype = sum(sizes), pieces[0][0].dtype
            slots = [slot[: length * dtype.itemsize].view(dtype) for slot in self._next()]
            for slot, mine in zip(slots[first:], pieces, strict=False):
                torch.cat(mine, out=slot)
            yield from self._barrier(meant)
            begin, end = (length * n // self._world_size for n in (self._rank, self._rank + 1))
            self._add([slot[begin:end] for slot in slots])
            yield from self._barrier(meant)
            for part, total in zip(pieces[0], slots[0].split(sizes), strict=True):
                part.copy_(total)

    def _add(self, slots: Sequence[torch.Tensor]) -> None:
        """Add all slots, in place of the first."""
        if self.virtual_workers is not None:
            add_subtrees(self.virtual_workers, self._world_size, slots)
            return
        for slot in slots[1:]:
            slots[0].add_(slot)

    def _first_slot(self) -> int:
        """Return the first of this rank's slots."""
        if self.virtual_workers is None:
            return self._rank
        before = range(self._rank)
        return sum(len(subtrees(self.virtual_workers, self._world_size, each)) for each in before)

    def send(self, tensor: torch.Tensor, *, source: int) -> Iterator[float]:
        """Broadcast one rank's tensor to all ranks, in place.

        Args:
            tensor: a contiguous CPU tensor of any shape and dtype.
            source: the rank that sends its tensor.

        Raises:
            RuntimeError: another rank's tensor has a different size.
            TimeoutError: another rank doesn't call this in time.
        """
        meant = tensor.nbytes
        for piece in tensor.detach().view(-1).view(torch.uint8).split(_SLOT):
            slot = self._next()[source][: len(piece)]
            if source == self._rank:
                slot.copy_(piece)
            yield from self._barrier(meant)
            if source != self._rank:
                piece.copy_(slot)

    def vote(self, condition: bool, held: list[bool]) -> Iterator[float]:
        """Find out whether a condition holds on any rank, with one barrier and no tensor.

        The answer is appended to `held`.

        Raises:
            RuntimeError: another rank adds up or sends a tensor.
            TimeoutError: another rank doesn't call this in time.
        """
        words = yield from self._exchange(_VOTE | condition)
        for rank, word in enumerate(words):
            if word < _VOTE:
                raise self._differs(_VOTE, rank, word)
        held.append(any(word > _VOTE for word in words))

    def _next(self) -> torch.Tensor:
        """Switch to the buffer that no rank reads any more; return its slots, by rank."""
        self._half = 1 - self._half
        return self._slots[self._half]

    def _barrier(self, meant: int) -> Iterator[float]:
        """Wait for all ranks, and check that their tensors have the same size."""
        words = yield from self._exchange(meant)
        for rank, word in enumerate(words):
            if word != meant:
                raise self._differs(meant, rank, word)

    def _exchange(self, mine: int) -> Generator[float, None, list[int]]:
        """Wait for all ranks; return their words, by rank."""
        self._barriers += 1
        # A rank that is one barrier ahead writes its word into the other buffer.
        words = self._meant[self._barriers % _HALVES]
        words[self._rank] = mine
        self._counters[self._rank] = self._barriers
        for rank in range(self._world_size):
            if self._counters[rank] < self._barriers:
                yield from self._await(rank)
        return list(words)

    def _differs(self, mine: int, rank: int, theirs: int) -> RuntimeError:
        return RuntimeError(
            f"rank {self._rank} has {_named(mine)} where rank {rank} has {_named(theirs)}: all "
            "ranks must train the same model, in the same steps."
        )

    def _await(self, rank: int) -> Iterator[float]:
        began = time.perf_counter()
        while self._counters[rank] < self._barriers:
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
            yield waited


def _pieces(vector: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a vector into pieces of a slot, each a list of one-dimensional parts."""
    most = _SLOT // vector[0].element_size()
    if not any(map(torch.numel, vector)):
        # Another rank's may not be empty: all meet.
        yield [vector[0].detach().view(-1)]
        return
    piece: list[torch.Tensor] = []
    room = most
    for tensor in vector:
        rest = tensor.detach().view(-1)
        while len(rest) >= room:
            piece.append(rest[:room])
            yield piece
            rest, piece, room = rest[room:], [], most
        if len(rest):
            piece.append(rest)
            room -= len(rest)
    if piece:
        yield piece


def _named(word: int) -> str:
    return "a vote on whether to stop" if word >= _VOTE else f"a tensor of {word} bytes"


def size_for(world_size: int, virtual_workers: int | None = None) -> int:
    """Return the bytes of shared memory for this number of ranks, and of virtual workers."""
    return world_size * _LINE + _HALVES * _slots(world_size, virtual_workers) * _SLOT


def _slots(world_size: int, virtual_workers: int | None) -> int:
    """Return the number of slots: each rank needs one for every tensor that it gives."""
    return world_size if virtual_workers is None else len(all_subtrees(virtual_workers, world_size))
