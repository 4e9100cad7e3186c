"""Sums of gradients over virtual workers: in shared memory, or by collective operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from polytrain_torch.collectives.socket_sums import SocketSums
from polytrain_torch.collectives.tree_sums import Vector, joined, summed


class SummingGroup(Protocol):
    """A process group that adds the sums of subtrees itself, in shared memory."""

    def add_up(self, sums: Sequence[Sequence[torch.Tensor]]) -> None:
        """Replace the first sum by that over all virtual workers; see `SharedSums.add_up`."""
        ...


class RankSums:
    """One rank's sums. All ranks add the same models, and begin the same sums in the same order."""

    def __init__(self, count: int) -> None:
        """
        Args:
            count: number of virtual workers.
        """
        self._count = count
        self._are_all_on_cpu = True
        self.on_node: SummingGroup | None = None
        """The group that adds tensors on the CPU; None if ranks can't share memory."""

        self._between_nodes: SocketSums | None = None

    def add_model(self, model: torch.nn.Module, on_node: SummingGroup | None) -> None:
        """Add up this model's gradients too.

        Args:
            model: the model.
            on_node: the group that adds tensors on the CPU, if all ranks can share memory.
        """
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        self._are_all_on_cpu = self._are_all_on_cpu and is_on_cpu
        self.on_node = on_node or self.on_node
        needs_messages = dist.get_world_size() > 1 and self.on_node is None and is_on_cpu
        if needs_messages and self._between_nodes is None and dist.get_backend() == "gloo":
            self._between_nodes = SocketSums()

    @property
    def overlap(self) -> bool:
        """Whether sums are made while this rank computes."""
        return self._between_nodes is not None and self._are_all_on_cpu

    def begin(self, sums: list[Vector]) -> Callable[[], Vector]:
        """Begin to add the sums of all ranks' subtrees."""
        is_on_cpu = sums[0][0].device.type == "cpu"
        if is_on_cpu and self._between_nodes is None and self.on_node is not None:
            self.on_node.add_up(sums)
            total = sums[0]
            return lambda: total
        if is_on_cpu and self._between_nodes is not None:
            wait = self._between_nodes.begin(self._count, sums)
            return lambda: [wait()]
        total = [summed(self._count, joined(sums))]
        return lambda: total
