"""Whether a cluster can hold the workers that a user asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many workers a cluster can hold at most, and why not more."""

    workers: int
    reason: str


def largest_fit(node_totals: Sequence[Mapping[str, float]], demand: Mapping[str, float]) -> Fit:
    """Count the workers that fit on the nodes when nothing else runs on them.

    Args:
        node_totals: each node's resources in all.
        demand: resources of one worker.
    """
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    workers = sum(
        min(
            (_units(totals.get(name, 0.0)) // _units(amount) for name, amount in needed.items()),
            default=0,
        )
        for totals in node_totals
    )
    one = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    held = "; ".join(
        ", ".join(f"{totals.get(name, 0.0):g} {name}" for name in needed) for totals in node_totals
    )
    nodes = "1 node" if len(node_totals) == 1 else f"{len(node_totals)} nodes"
    return Fit(workers=workers, reason=f"each worker takes {one}; the cluster has {nodes} ({held})")


def _units(amount: float) -> int:
    """An amount as Ray counts it: in ten-thousandths, without rounding errors."""
    return round(amount * 10_000)
