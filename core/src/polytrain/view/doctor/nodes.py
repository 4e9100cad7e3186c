"""Checks of every node of a Ray cluster."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions

import ray

from polytrain.policy.placement import NodeAddress
from polytrain.ray_api.state import living_nodes, node_addresses
from polytrain.storage.location import Location, Refusal, refusal
from polytrain.view.doctor import machine
from polytrain.view.doctor.finding import CheckFailed, Finding, checked, failed_with
from polytrain.view.doctor.links import findings_of_links, on_node
from polytrain.workers.agents.node_checks import other_versions
from polytrain.workers.ray.connection import running_ray
from polytrain_plugins import Backend

_TIMEOUT_S = 60.0
_SKEW_S = 5.0
_COMPARED = ("polytrain", "ray", "pyarrow", "numpy", "torch", "xgboost", "lightgbm", "tensorflow")
"""Beginnings of the names of distributions that must be equal everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node says of itself."""

    findings: tuple[Finding, ...]
    versions: Mapping[str, str]
    time: float
    read: bytes | None
    """What it has read of the file that the driver has written; None if it sees none."""

    refusal: Refusal | None
    """What the storage refuses to it; None if it can write, read and delete a file of its own."""


def findings_of_nodes(location: Location, backends: Sequence[Backend]) -> Iterator[Finding]:
    """Yield the findings on every living node, by the node's address, and on their connections.

    Args:
        location: the storage that all nodes must see.
        backends: whose transports are tried between them.
    """
    name = f".polytrain-doctor-{secrets.token_hex(8)}"
    content = secrets.token_bytes(16)
    with running_ray():
        location.open().write(name, content)
        try:
            own = report(location, name)
            for place in _nodes():
                yield from _findings_of(place, location, name, content, own)
        finally:
            location.open().delete(name)
        gpus = {node: totals.get("GPU", 0.0) for node, totals in living_nodes().items()}
        yield from findings_of_links(backends, _nodes(), gpus)


def report(location: Location, name: str) -> NodeReport:
    """Run this machine's checks, read the driver's file, and try one of its own."""
    try:
        read = location.open().read(name)
    except OSError:
        read = None
    return NodeReport(
        findings=tuple(checked(each, check) for each, check in machine.CHECKS.items()),
        versions=_versions(),
        time=time.time(),
        read=read,
        refusal=refusal(location),
    )


def same_versions(node: Mapping[str, str], driver: Mapping[str, str]) -> str:
    """Pickles and collectives need the same versions everywhere."""
    differ = other_versions(node, driver)
    if differ:
        raise CheckFailed(
            f"other versions: {', '.join(differ)}", "Install the same versions on every node"
        )
    return f"{len(driver)} are the driver's"


def usable_storage(answer: NodeReport, content: bytes, location: Location) -> str:
    """Every node must see what the driver writes, and store its parts of checkpoints."""
    read, refused = answer.read, answer.refusal
    if refused is not None:
        raise CheckFailed(f"it {refused.what}", refused.remedy)
    if read != content:
        what = "doesn't see" if read is None else "sees other content in"
        raise CheckFailed(
            f"it {what} a file that the driver has just written to {location.address}",
            "Use a directory that all nodes mount, or object storage",
        )
    return "it reads what the driver has written, and can write"


def same_time(skew_s: float) -> str:
    """Times in journals and logs come from several nodes."""
    if abs(skew_s) > _SKEW_S:
        raise CheckFailed(
            f"its clock differs by {skew_s:.0f} s from the driver's", "Synchronise clocks (NTP)"
        )
    return "its clock is the driver's"


def _findings_of(
    place: NodeAddress, location: Location, name: str, content: bytes, own: NodeReport
) -> Iterator[Finding]:
    asked, address = time.time(), place.host
    try:
        task = ray.remote(report).options(num_cpus=0, scheduling_strategy=on_node(place.node_id))
        answer: NodeReport = ray.get(task.remote(location, name), timeout=_TIMEOUT_S)
    except Exception as error:  # whatever becomes of the task is what the user wants to know
        yield failed_with(f"{address}: answers", error)
        return
    # What the call has taken is no skew.
    skew_s = min(answer.time - asked, 0.0) or max(answer.time - time.time(), 0.0)
    for finding in answer.findings:
        yield replace(finding, check=f"{address}: {finding.check}")
    yield checked(f"{address}: versions", lambda: same_versions(answer.versions, own.versions))
    yield checked(f"{address}: storage", lambda: usable_storage(answer, content, location))
    yield checked(f"{address}: clock", lambda: same_time(skew_s))


def _nodes() -> list[NodeAddress]:
    addresses = node_addresses()
    alive = [NodeAddress(node_id=node, host=addresses[node]) for node in living_nodes()]
    return sorted(alive, key=lambda node: (node.host, node.node_id))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for each in distributions():
        name = each.metadata["Name"] or ""
        if name.lower().startswith(_COMPARED):
            found[name.lower()] = each.version
    return found
