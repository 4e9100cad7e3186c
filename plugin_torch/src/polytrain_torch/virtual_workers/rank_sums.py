"""Sums of gradients over virtual workers: in shared memory, or by collective operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from polytrain_torch.collectives.operation_queue import OperationQueue
from polytrain_torch.collectives.tree_sums import Vector, join, joined, summed
from polytrain_torch.private import timeout_of

if TYPE_CHECKING:
    from polytrain_torch.collectives.node_group import NodeGroup


class RankSums:
    """One rank's sums over `count` virtual workers.

    All ranks add the same models, and begin the same sums in the same order.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._are_all_on_cpu = True
        self.on_node: NodeGroup | None = None
        """The group that adds tensors on the CPU; None if ranks can't share memory."""

        self._between_nodes: _SocketSums | None = None

    def add_model(self, model: torch.nn.Module, on_node: NodeGroup | None) -> None:
        """Add up this model's gradients too, on the CPU by `on_node` if ranks share memory."""
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._are_all_on_cpu = self._are_all_on_cpu and is_on_cpu
        self.on_node = on_node or self.on_node
        needs_messages = dist.get_world_size() > 1 and self.on_node is None and is_on_cpu
        if needs_messages and self._between_nodes is None and dist.get_backend() == "gloo":
            self._between_nodes = _SocketSums(self._count)

    @property
    def overlap(self) -> bool:
        """Whether sums are made while this rank computes."""
        return self._between_nodes is not None and self._are_all_on_cpu

    def begin(self, sums: list[Vector]) -> Callable[[], Vector]:
        """Begin to add the sums of all ranks' subtrees; return a function that waits for it.

        Args:
            sums: of this rank's subtrees, from the first to the last. They may be taken out of the
                list. The first may be overwritten; the others must stay as they are until the sum
                is made.
        """
        is_on_cpu = sums[0][0].device.type == "cpu"
        if is_on_cpu and self._between_nodes is not None:
            wait = self._between_nodes.begin(sums)
            return lambda: [wait()]
        if is_on_cpu and self.on_node is not None:
            self.on_node.add_up(sums)
            total = sums[0]
        else:
            total = [summed(self._count, joined(sums))]
        return lambda: total


class _SocketSums:
    """Sums of tensors on the CPU by messages, while this rank computes.

    They have a process group of their own: collective calls of the training function may come
    between them, on each rank elsewhere.
    """

    def __init__(self, count: int) -> None:
        """Open connections to the other ranks. All ranks call this."""
        timeout = timeout_of(dist.group.WORLD)
        self._count = count
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._queue = OperationQueue()

    def begin(self, sums: list[Vector]) -> Callable[[], torch.Tensor]:
        """Begin to add up; see `RankSums.begin`. The first sum is copied."""
        total = join(sums.pop(0))
        return self._queue.run(self._adding(total, sums), total, blocks=False).wait

    def _adding(self, total: torch.Tensor, others: list[Vector]) -> Iterator[float]:
        # To the queue's thread: waiting for sockets is what takes the time.
        yield math.inf
        with torch.no_grad():
            # Not before: many sums may wait for their turn.
            summed(self._count, [total, *joined(others)], self._group)
