"""Sums over virtual workers by messages, while this rank computes.

They have a process group of their own: collective calls of the training function may come between
them, on each rank elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from polytrain_torch.collectives.operation_queue import OperationQueue
from polytrain_torch.collectives.tree_sums import Vector, join, joined, summed
from polytrain_torch.private import timeout_of

_CPU = torch.device("cpu")


class SocketSums:
    """One rank's sums of tensors on the CPU. All ranks begin the same ones in the same order."""

    def __init__(self) -> None:
        """Open connections to the other ranks. All ranks call this."""
        timeout = timeout_of(dist.group.WORLD, _CPU)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._queue = OperationQueue()

    def begin(self, leaves: int, sums: list[Vector]) -> Callable[[], torch.Tensor]:
        """Begin to add up, and return a function that waits for the sum.

        Args:
            leaves: number of virtual workers.
            sums: of this rank's subtrees, from the first to the last. The first is copied; the
                others must stay as they are until the sum is made. They are taken out of the list.
        """
        total = join(sums.pop(0))
        return self._queue.run(self._adding(leaves, total, sums), total, blocks=False).wait

    def _adding(self, leaves: int, total: torch.Tensor, others: list[Vector]) -> Iterator[float]:
        # To the queue's thread: waiting for sockets is what takes the time.
        yield math.inf
        with torch.no_grad():
            # Not before: many sums may wait for their turn.
            summed(leaves, [total, *joined(others)], self._group)
