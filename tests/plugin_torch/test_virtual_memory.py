"""Virtual workers keep sums of subtrees: no more of them than the tree has levels."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.gradient_memory import peak
from tests.sweeps import only_in_sweep

REST = 0.01
"""What a step makes beside gradients, in sets of them."""


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> float:
    return peak(tmp_path_factory.mktemp("ddp"), 2, None)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("workers", "virtual_workers", "sockets"),
    [
        (1, 4, False),
        (2, 4, True),
        only_in_sweep(2, 2, True),
        only_in_sweep(2, 2, False),
        only_in_sweep(2, 4, False),
        only_in_sweep(4, 4, True),
        only_in_sweep(4, 4, False),
        only_in_sweep(1, 3, False),
        only_in_sweep(1, 7, False),
        (2, 6, True),
        only_in_sweep(2, 5, False),
        only_in_sweep(2, 5, True),
        only_in_sweep(2, 6, False),
        only_in_sweep(2, 7, False),
        only_in_sweep(1, 8, False),
        only_in_sweep(2, 8, False),
        only_in_sweep(2, 8, True),
        (3, 8, True),
        only_in_sweep(4, 8, False),
    ],
)
def test_a_step_has_at_most_as_many_more_sets_of_gradients_as_the_tree_has_levels(
    tmp_path: Path, of_ddp: float, workers: int, virtual_workers: int, sockets: bool
) -> None:
    ours = peak(tmp_path, workers, virtual_workers, sockets=sockets)
    assert of_ddp == pytest.approx(1, abs=REST)
    assert 1 <= ours <= of_ddp + math.log2(virtual_workers) + REST


def test_as_many_workers_as_virtual_workers_have_one_set(tmp_path: Path) -> None:
    """On one node: gradients are summed where they are."""
    assert peak(tmp_path, 2, 2) <= 1 + REST
