"""The sum over virtual workers has the same bits, however many ranks share the work."""

from __future__ import annotations

import math
import mmap
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytrain_plugins import virtual_workers_of
from polytrain_torch.collectives.shared_sums import SharedSums, size_for
from polytrain_torch.collectives.tree_sums import (
    Tree,
    add_subtrees,
    all_subtrees,
    leaf,
    subtrees,
)

WORLDS = st.integers(1, 33).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))


def values(leaves: int, length: int = 64) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that another order has other bits."""
    generator = torch.Generator().manual_seed(leaves)
    sizes = 10.0 ** torch.randint(-6, 7, (leaves, length), generator=generator)
    return list(torch.randn(leaves, length, generator=generator) * sizes)


def by_halves(parts: list[torch.Tensor]) -> torch.Tensor:
    """The definition: from the end, neighbours are added until one is left."""
    while len(parts) > 1:
        pairs = [parts[max(at - 2, 0) : at] for at in range(len(parts), 0, -2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in reversed(pairs)]
    return parts[0]


def local_sums(leaves: int, world_size: int, rank: int) -> tuple[list[torch.Tensor], int]:
    """A rank's sums, and how many tensors it held at once."""
    tree: Tree[torch.Tensor] = Tree(leaves, torch.Tensor.add_)
    all_values, most = values(leaves), 0
    for number in reversed(virtual_workers_of(leaves, world_size, rank)):
        most = max(most, len(tree.held) + 1)
        tree.take(leaf(leaves, number), all_values[number])
    return tree.taken(), most


@given(world=WORLDS)
def test_any_number_of_ranks_has_the_bits_of_one_tree(world: tuple[int, int]) -> None:
    leaves, world_size = world
    sums = [each for rank in range(world_size) for each in local_sums(leaves, world_size, rank)[0]]
    total = add_subtrees(leaves, world_size, sums)
    assert torch.equal(total, by_halves(values(leaves)))


@pytest.mark.parametrize(("world_size", "most"), [(1, 5), (2, 4), (4, 3), (16, 1)])
def test_a_rank_holds_logarithmically_many_tensors(world_size: int, most: int) -> None:
    assert local_sums(16, world_size, 0)[1] == most


@pytest.mark.parametrize("leaves", range(1, 25))
def test_a_rank_holds_at_most_the_logarithm_more_at_any_number_of_ranks(leaves: int) -> None:
    worlds = [(size, rank) for size in range(1, leaves + 1) for rank in range(size)]
    assert max(local_sums(leaves, *world)[1] for world in worlds) <= 1 + math.log2(leaves)


def test_one_rank_holds_at_most_the_logarithm_more_of_any_number() -> None:
    assert all(local_sums(leaves, 1, 0)[1] <= 1 + math.log2(leaves) for leaves in range(1, 130))


@pytest.mark.parametrize(("leaves", "world_size"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3)])
def test_equal_ranks_send_as_much_as_in_a_ring(leaves: int, world_size: int) -> None:
    assert len(all_subtrees(leaves, world_size)) == world_size


def test_the_subtrees_of_a_rank_cover_its_virtual_workers() -> None:
    # Of 0 to 7 it has 2 to 4: 4 is number 3 from the end, and 2 and 3 are pair number 2.
    assert [tuple(node) for node in subtrees(8, 3, 1)] == [(0, 3), (1, 2)]


@settings(deadline=None, max_examples=15)
@given(world=WORLDS.filter(lambda world: 2 <= world[1] <= 4))
def test_shared_memory_has_the_same_bits(world: tuple[int, int]) -> None:
    leaves, world_size = world
    memory = mmap.mmap(-1, size_for(world_size, leaves))

    def take_part(rank: int) -> torch.Tensor:
        sums = SharedSums(
            memory, rank=rank, world_size=world_size, timeout_s=60, virtual_workers=leaves
        )
        parts, _ = local_sums(leaves, world_size, rank)
        # Cut into tensors of several sizes.
        cut = [[*part.split([1, 40, 23])] for part in parts]
        deque(sums.add_up(*cut), maxlen=0)
        return torch.cat(cut[0])

    with ThreadPoolExecutor(world_size) as threads:
        totals = list(threads.map(take_part, range(world_size)))
    assert all(torch.equal(total, by_halves(values(leaves))) for total in totals)
