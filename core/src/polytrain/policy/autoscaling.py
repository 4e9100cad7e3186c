"""What Ray's autoscaler says of nodes that may come. Pure.

Ray has two autoscalers, which report in different forms. Both run on every cluster. An autoscaler
that nobody configured only mirrors the existing nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MIRRORED = "node_"
"""Prefix of the first autoscaler's type of a mirrored node, followed by the node's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerReport:
    """The autoscaler's report, in one form for both autoscalers."""

    adds_nodes: bool
    """Whether it may add nodes. The second autoscaler doesn't report that it only mirrors them."""

    starting: Mapping[str, int] = field(default_factory=dict)
    """Node type → number of nodes that are starting."""

    failures: tuple[str, ...] = ()
    """Nodes that could not be started, or that have failed, with the reason."""

    infeasible: frozenset[str] = frozenset()
    """Identifiers of placement groups that none of its node types can hold. Only the second
    autoscaler names them."""

    infeasible_actors: tuple[Mapping[str, float], ...] = ()
    """Resources of each actor or task that none of its node types can hold; the same holds."""


def report_of_v1(status: Mapping[str, Any]) -> AutoscalerReport:
    """Read the status that Ray's first autoscaler writes.

    Args:
        status: its JSON, decoded.
    """
    report = status.get("autoscaler_report") or {}
    types = {*report.get("active_nodes", {}), *(report.get("idle_nodes") or {})}
    starting = Counter(report.get("pending_launches") or {})
    starting.update(kind for _, kind, *_ in report.get("pending_nodes") or ())
    availability = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    return AutoscalerReport(
        adds_nodes=any(not kind.startswith(_MIRRORED) for kind in (*types, *starting)),
        starting=dict(starting),
        failures=(
            *_unavailable(availability),
            *(f"{kind}: a node has failed" for _, kind in report.get("failed_nodes") or ()),
        ),
    )


def _unavailable(availability: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for kind, record in availability.items():
        why = record.get("unavailable_node_information")
        if not record.get("is_available", True) and why:
            yield f"{kind}: {why.get('description') or why.get('category')}"


def report_of_v2(state: Mapping[str, Any]) -> AutoscalerReport:
    """Read the state that Ray's second autoscaler reports.

    Args:
        state: the message `AutoscalingState`, as a dictionary.
    """
    starting: Counter[str] = Counter()
    for request in state.get("pending_instance_requests", ()):
        starting[request["ray_node_type_name"]] += request["count"]
    starting.update(each["ray_node_type_name"] for each in state.get("pending_instances", ()))
    return AutoscalerReport(
        adds_nodes=True,
        starting=dict(starting),
        failures=tuple(
            f"{each['ray_node_type_name']}: {each.get('reason') or 'it could not be started'}"
            for each in state.get("failed_instance_requests", ())
        ),
        infeasible=frozenset(
            # The details are the group's identifier, its strategy and its state.
            each.get("details", "").partition(":")[0]
            for each in state.get("infeasible_gang_resource_requests", ())
        ),
        infeasible_actors=tuple(
            each.get("resources_bundle", {})
            for each in state.get("infeasible_resource_requests", ())
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The cluster's prospects for agents that are requested."""

    says: str
    """The autoscaler's statement, as part of a sentence."""

    refused: int = 0
    """Number of agents for which it can't add nodes."""

    is_certain: bool = True
    """Whether these are known to be the run's: it names actors by their resources only, which
    another job's may have, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerDemand:
    """What the agents of one run ask the cluster for."""

    groups: Mapping[str, int]
    """Identifiers of placement groups → their numbers of agents."""

    actors: int = 0
    """Number of agents without a group, each of which asks by an actor of its own."""

    resources: Mapping[str, float] = field(default_factory=dict)


def outlook(report: AutoscalerReport | None, demand: AutoscalerDemand) -> Outlook:
    """Read the autoscaler's report for the agents of one run.

    Args:
        report: None if no autoscaler has reported.
    """
    if report is None or not report.adds_nodes:
        return Outlook(says="no autoscaler adds nodes to it")
    refused = sum(count for name, count in demand.groups.items() if name in report.infeasible)
    own = {name: amount for name, amount in demand.resources.items() if amount > 0}
    alike = min(demand.actors, sum(each == own for each in report.infeasible_actors))
    refused += alike
    if report.starting:
        nodes = ", ".join(f"{count} {kind}" for kind, count in sorted(report.starting.items()))
        does = f"is starting nodes ({nodes})"
    elif refused:
        does = "has no nodes to add that could hold them"
    else:
        does = "isn't starting any nodes"
    said = f"its autoscaler has been asked for them, and {does}"
    if report.failures:
        said += f"; it has failed to start some ({_last(report.failures)})"
    return Outlook(says=said, refused=0 if report.starting else refused, is_certain=not alike)


def _last(failures: Iterable[str]) -> str:
    """Return the newest failures, each once."""
    return "; ".join(list(dict.fromkeys(failures))[-3:])


def only_we_use(
    totals: Mapping[str, Mapping[str, float]],
    free: Mapping[str, Mapping[str, float]],
    agents: Iterable[str],
    demand: Mapping[str, float],
) -> bool:
    """Return whether others use none of the resources that the run needs, and so can't free any."""
    own = Counter(agents)
    return all(
        total.get(name, 0.0) - free.get(node, {}).get(name, 0.0) <= own[node] * amount + 1e-6
        for node, total in totals.items()
        for name, amount in demand.items()
        if amount > 0
    )
