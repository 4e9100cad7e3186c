"""Decides whether `RunConfig.ports` has as many ports as the ranks of a host listen at. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polytrain.config.configs import ScalingConfig
from polytrain.config.listening import ports_of
from polytrain.text.first_few import numbered
from polytrain_plugins import Demand, Member, Problem


def port_problems(
    given: int | str | None, demand: Demand, scaling: ScalingConfig, *, is_one_host: bool
) -> Iterator[Problem]:
    """Yield a problem if there are too few ports, wherever the workers are placed.

    Args:
        given: the user's `RunConfig.ports`.
        demand: how many ports the ranks of the backend need.
        scaling: the number of workers.
        is_one_host: whether all workers are on one host for certain.
    """
    allowed = ports_of(given)
    is_one_host = is_one_host or scaling.placement_strategy == "STRICT_PACK"
    ranks = max(1, scaling.min_workers) if is_one_host else 1
    needed = demand.leader_ports + ranks * demand.ports
    if allowed is None or len(allowed) >= needed:
        return
    yield Problem(
        field="RunConfig.ports",
        what=f"{given!r} allows {numbered(len(allowed), 'port')}, and one host with "
        f"{numbered(ranks, 'rank')} needs {needed}",
        remedy=f"Allow at least {needed}, such as {_wider(allowed, needed)!r}",
    )


def too_few_ports(given: int | str | None, demand: Demand, members: Sequence[Member]) -> str | None:
    """Return why ranks that have their places can't all listen; None if they can.

    Args:
        given: the user's `RunConfig.ports`.
        demand: how many ports the ranks of the backend need.
        members: all ranks.
    """
    allowed = ports_of(given)
    if allowed is None:
        return None
    for first in (member for member in members if member.local_rank == 0):
        needed = first.local_world_size * demand.ports
        needed += demand.leader_ports * (first.node_rank == 0)
        if needed > len(allowed):
            return (
                f"RunConfig(ports={given!r}) allows {numbered(len(allowed), 'port')}, and "
                f"{first.host} with {numbered(first.local_world_size, 'rank')} needs {needed}. "
                f"Allow at least {needed}, such as {_wider(allowed, needed)!r}, or place fewer "
                'workers on a host with ScalingConfig(placement_strategy="SPREAD")'
            )
    return None


def _wider(allowed: range, needed: int) -> str:
    first = min(allowed[0], 65536 - needed)
    return f"{first}-{first + needed - 1}"
