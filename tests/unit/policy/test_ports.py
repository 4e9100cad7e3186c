"""Whether the ports that the user allows are enough for the ranks of each host."""

from __future__ import annotations

import pytest

from polytrain.config.configs import ScalingConfig
from polytrain.config.listening import port_problems, too_few_ports
from polytrain.policy.placement import NodeAddress, members
from polytrain_plugins import Demand

LEADERS = Demand(leader_ports=1)
RANKS = Demand(ports=1)
BOTH = Demand(ports=1, leader_ports=1)


@pytest.mark.parametrize(
    ("given", "demand", "scaling", "is_one_host", "needed"),
    [
        (None, BOTH, ScalingConfig(num_workers=64), True, None),
        (30000, LEADERS, ScalingConfig(num_workers=64), True, None),
        (30000, RANKS, ScalingConfig(num_workers=2), True, 2),
        ("30000-30003", BOTH, ScalingConfig(num_workers=4), True, 5),
        ("30000-30004", BOTH, ScalingConfig(num_workers=4), True, None),
        # Elsewhere each rank may have a host of its own.
        (30000, RANKS, ScalingConfig(num_workers=2), False, None),
        (30000, BOTH, ScalingConfig(num_workers=2), False, 2),
        (30000, RANKS, ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK"), False, 2),
        # An elastic run that can begin may find room on other hosts.
        (30000, RANKS, ScalingConfig(num_workers=(1, 8)), True, None),
        (30000, BOTH, ScalingConfig(num_workers=0), True, 2),
    ],
)
def test_what_can_never_be_enough_is_a_problem(
    given: int | str | None,
    demand: Demand,
    scaling: ScalingConfig,
    is_one_host: bool,
    needed: int | None,
) -> None:
    problems = [*port_problems(given, demand, scaling, is_one_host=is_one_host)]
    if needed is None:
        assert problems == []
        return
    [problem] = problems
    assert problem.field == "RunConfig.ports"
    assert problem.what.endswith(f"needs {needed}")
    assert f"Allow at least {needed}, such as '30000-{30000 + needed - 1}'" in problem.remedy


def test_a_wider_range_ends_with_the_last_port() -> None:
    [problem] = port_problems(65535, RANKS, ScalingConfig(num_workers=3), is_one_host=True)
    assert "'65533-65535'" in problem.remedy


def test_ranks_are_counted_host_by_host() -> None:
    places = [NodeAddress(node_id=node, host=f"host {node}") for node in "aabbb"]
    everybody = members(places, cpus=1, gpus=0)
    assert too_few_ports(None, BOTH, everybody) is None
    assert too_few_ports("30000-30002", BOTH, everybody) is None
    assert too_few_ports(30000, LEADERS, everybody) is None
    why = too_few_ports("30000-30001", RANKS, everybody)
    assert why is not None
    assert "host b with 3 ranks needs 3" in why
    why = too_few_ports("30000-30001", BOTH, everybody)
    assert why is not None
    assert "host a with 2 ranks needs 3" in why
