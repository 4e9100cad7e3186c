"""How many workers a cluster holds, and what is said when that is too few."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain import ScalingConfig
from polytrain.policy.scaling import worker_capacity


@pytest.mark.parametrize(("amount", "seen"), [(0, 0), (0.5, 1), (1, 1), (2, 2)])
def test_a_worker_sees_the_gpu_that_it_has_a_part_of(amount: float, seen: int) -> None:
    assert ScalingConfig(resources_per_worker={"GPU": amount}).gpus_per_worker == seen


def test_the_scarcest_resource_of_a_node_decides() -> None:
    assert worker_capacity([{"CPU": 16, "GPU": 2}], {"CPU": 4, "GPU": 1}).workers == 2


def test_what_is_left_over_on_two_nodes_holds_no_worker() -> None:
    assert worker_capacity([{"CPU": 3}, {"CPU": 3}], {"CPU": 2}).workers == 2


def test_a_node_without_the_resource_holds_none() -> None:
    assert worker_capacity([{"CPU": 64}, {"CPU": 8, "GPU": 1}], {"CPU": 1, "GPU": 1}).workers == 1


def test_an_empty_cluster_holds_none() -> None:
    assert worker_capacity([], {"CPU": 1}).workers == 0


def test_resources_of_amount_zero_are_not_needed() -> None:
    assert worker_capacity([{"CPU": 4}], {"CPU": 1, "GPU": 0}).workers == 4


def test_the_reason_tells_demand_and_supply() -> None:
    reason = worker_capacity([{"CPU": 4, "memory": 9}, {"CPU": 2}], {"CPU": 8, "GPU": 0.5}).reason
    assert "8 CPU and 0.5 GPU" in reason
    assert "2 nodes" in reason
    assert "4 CPU, 0 GPU; 2 CPU, 0 GPU" in reason


@given(
    cpus=st.lists(st.integers(0, 128), max_size=4),
    hundredths=st.integers(min_value=1, max_value=400),
)
def test_fractions_of_a_resource_are_counted_exactly(cpus: list[int], hundredths: int) -> None:
    """Ray counts in ten-thousandths: 126 CPUs hold 225 workers of 0.56, not 224."""
    capacity = worker_capacity([{"CPU": float(cpu)} for cpu in cpus], {"CPU": hundredths / 100})
    assert capacity.workers == sum(cpu // Fraction(hundredths, 100) for cpu in cpus)
