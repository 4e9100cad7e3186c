"""Sums over virtual workers as one binary tree, whatever the number of ranks.

Floating-point addition isn't associative: the order of additions decides the last bits of a sum. So
the sum over C virtual workers is always the same tree. A node of level k has 2^k consecutive
virtual workers, fewer at the beginning of the line, and is the sum of its two halves. A rank adds
what it has of the tree (`Tree`) from its last virtual worker to its first: counted from the end, a
rank that has all of them holds at most log2(C) values beside the one that it adds. The largest
subtrees that lie within one rank each are left over, and `summed` adds those of all ranks: an
all-to-all of pieces, the rest of the tree for each piece, and an all-gather. With one subtree a
rank these send the bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from polytrain_plugins import virtual_workers_of

AnyValue = TypeVar("AnyValue")

Vector = Sequence[torch.Tensor]
"""Elements of contiguous tensors, one after the other."""


def join(vector: Vector) -> torch.Tensor:
    """Return a vector as one new tensor."""
    return torch.cat([each.view(-1) for each in vector])


def joined(vectors: list[Vector]) -> list[torch.Tensor]:
    """Take vectors out of a list one by one, so that each may be released, and join each."""
    return [join(vectors.pop(0)) for _ in range(len(vectors))]


class Node(NamedTuple):
    """A subtree of `1 << level` virtual workers: from the end, those from `number << level` on."""

    level: int
    number: int


def leaf(leaves: int, virtual_worker: int) -> Node:
    """Return the node of one of `leaves` virtual workers."""
    return Node(0, leaves - 1 - virtual_worker)


class Tree(Generic[AnyValue]):
    """A sum under way, of values that come from the last of `leaves` virtual workers to the first.

    `add` adds the value of the right half to that of the left half.
    """

    def __init__(self, leaves: int, add: Callable[[AnyValue, AnyValue], AnyValue]) -> None:
        self._leaves = leaves
        self._add = add
        self.held: list[tuple[Node, AnyValue]] = []
        """Subtrees that are complete and whose neighbours aren't, from the last to the first."""

    def taken(self) -> list[AnyValue]:
        """Take the sums of the subtrees, from the first virtual worker to the last."""
        sums = [value for _, value in reversed(self.held)]
        self.held.clear()
        return sums

    def take(self, node: Node, value: AnyValue) -> None:
        """Add the subtree to the left of all that came so far."""
        level, number = node
        while (1 << level) < self._leaves:
            if number % 2:
                if not self.held or self.held[-1][0] != Node(level, number - 1):
                    break
                value = self._add(value, self.held.pop()[1])
            elif (number + 1) << level < self._leaves:
                break
            level, number = level + 1, number // 2
        self.held.append((Node(level, number), value))


@cache
def subtrees(leaves: int, world_size: int, rank: int) -> tuple[Node, ...]:
    """Return the largest subtrees that lie within a rank, from the last to the first."""
    tree: Tree[Any] = Tree(leaves, lambda left, _: left)
    for virtual_worker in reversed(virtual_workers_of(leaves, world_size, rank)):
        tree.take(leaf(leaves, virtual_worker), None)
    return tuple(node for node, _ in tree.held)


@cache
def all_subtrees(leaves: int, world_size: int) -> tuple[Node, ...]:
    """Return the subtrees of all ranks, in the order of ranks."""
    return tuple(
        node for rank in range(world_size) for node in reversed(subtrees(leaves, world_size, rank))
    )


@cache
def most_values(leaves: int, world_size: int) -> int:
    """Return the most values that a rank has at once: those that it holds, and its last one."""
    ranks = (virtual_workers_of(leaves, world_size, rank) for rank in range(world_size))
    most = 0
    for own in ranks:
        tree: Tree[Any] = Tree(leaves, lambda left, _: left)
        for virtual_worker in reversed(own):
            most = max(most, len(tree.held) + 1)
            tree.take(leaf(leaves, virtual_worker), None)
    return most


def add_subtrees(leaves: int, world_size: int, sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the sums of all ranks' subtrees, in place of the first one, and return it.

    They are in the order of `all_subtrees`.
    """
    tree: Tree[torch.Tensor] = Tree(leaves, torch.Tensor.add_)
    for node, value in reversed([*zip(all_subtrees(leaves, world_size), sums, strict=True)]):
        tree.take(node, value)
    [(_, total)] = tree.held
    return total


def summed(
    leaves: int, sums: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the sum over all virtual workers. All ranks call this.

    Args:
        leaves: number of virtual workers.
        sums: of this rank's subtrees, from the first to the last: one-dimensional tensors whose
            length the number of ranks divides. They are overwritten, and the list keeps the first.
        group: of all ranks; None for the default group.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        [total] = sums
        return total
    if sums[0].device.type != "cpu" and dist.get_backend() == "gloo":
        # gloo exchanges pieces of tensors on the CPU only.
        return sums[0].copy_(summed(leaves, [each.cpu() for each in sums]))
    counts = [len(subtrees(leaves, size, each)) for each in range(size)]
    piece = len(sums[0]) // size
    if len(sums) == 1:
        [sent] = sums
    else:
        sent = torch.stack([each.view(size, piece) for each in sums], dim=1).view(-1)
        del sums[1:]
    received = sent.new_empty(sum(counts) * piece)
    dist.all_to_all_single(
        received,
        sent,
        [count * piece for count in counts],
        [counts[rank] * piece] * size,
        group=group,
    )
    mine = add_subtrees(leaves, size, received.view(-1, piece).unbind())
    dist.all_gather(list(sums[0].view(size, piece).unbind()), mine, group=group)
    return sums[0]
