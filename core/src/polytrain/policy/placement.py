"""Decides how a run gets its agents, on which nodes, and which ranks they get. Pure.

That is: which to request, how long to wait, when to fail, and which nodes to avoid for a while.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from polytrain.config.configs import ScalingConfig
from polytrain.errors import FailureKind
from polytrain.policy.autoscaling import Outlook, only_we_use
from polytrain.policy.scaling import NAMED_HOSTS, STARTING_S, Starting, holds, worker_capacity
from polytrain.text.described import first_few, numbered, resource_amount
from polytrain_plugins import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """The node of one worker."""

    node_id: str
    host: str
    interface: str | None = None
    """The network interface with that address, if the user has chosen one."""

    unusable: str | None = None
    """The reason that the run can't use the node; None if it can."""

    other_versions: tuple[str, ...] = ()
    """What is installed there in another version than the driver's, with both versions."""


def rank_order(places: Sequence[NodeAddress], first_node: str) -> list[int]:
    """Return the order in which workers get their ranks: workers of one node are consecutive.

    Args:
        first_node: the node whose workers come first, if it has any; usually the driver's.

    Returns:
        Indices into `places`; the worker at position r becomes rank r.
    """
    order = {first_node: 0}
    for place in places:
        order.setdefault(place.node_id, len(order))
    return sorted(range(len(places)), key=lambda index: order[places[index].node_id])


def members(
    places: Sequence[NodeAddress], *, cpus: int, gpus: int, ports: range | None = None
) -> tuple[Member, ...]:
    """Return the members of a world, in rank order.

    Args:
        ports: those at which ranks may listen; None for any.
    """
    sizes = Counter(place.node_id for place in places)
    node_ranks = {node: node_rank for node_rank, node in enumerate(sizes)}
    local_ranks = {node: itertools.count() for node in sizes}
    return tuple(
        Member(
            rank=rank,
            world_size=len(places),
            local_rank=next(local_ranks[place.node_id]),
            local_world_size=sizes[place.node_id],
            node_rank=node_ranks[place.node_id],
            node_count=len(sizes),
            host=place.host,
            cpus=cpus,
            gpus=gpus,
            ports=ports,
            interface=place.interface,
        )
        for rank, place in enumerate(places)
    )


Nodes = Mapping[str, Mapping[str, float]]
"""Resources of each node, total or free."""

SHARED_RESOURCES = frozenset({"CPU", "memory"})
"""Resources that a worker needs as an amount, not as certain devices."""

_LOSSES = 3
"""Consecutive losses of agents to tolerate; at least the number of workers."""

_IF_HOPELESS = (
    "No other job holds any, so waiting doesn't help: ask for fewer workers or less per worker, or "
    "let the autoscaler add more or larger nodes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The agents that leave their nodes, and the nodes that new agents avoid."""

    leaving: frozenset[int]
    """Numbers of agents."""

    avoided: frozenset[str]
    reason: str = ""
    """The reason that agents stay on nodes that they should leave; empty if none do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The decisions for one run.

    `up` is the number of agents that have arrived, `coming` of those that are requested; `living`
    and `free` are the total and the free resources of all nodes; `outlook` is None without an
    autoscaler, and `starting` are agents that have their resources.
    """

    scaling: ScalingConfig

    def may_request(self, losses: int) -> bool:
        """Return whether to request further agents after this number of consecutive losses."""
        return losses <= max(_LOSSES, self.scaling.max_workers)

    def number_to_request(self, *, up: int, coming: int, is_placing: bool) -> int:
        """Return how many agents to request: workers first, then standbys.

        Args:
            is_placing: whether an attempt waits for its workers.
        """
        wanted = self.scaling.max_workers
        if self.scaling.is_elastic or not is_placing:
            wanted += self.scaling.standby
        return max(0, wanted - up - coming)

    def free_bundles(
        self, taken: Collection[int | None], nodes: Mapping[int, str], avoided: Collection[str]
    ) -> list[int]:
        """Return the bundles without an agent, in a run of a fixed size.

        Args:
            nodes: the node of each bundle that has had an agent.
            avoided: live nodes to avoid. Ray moves the bundles of a lost node.
        """
        if self.scaling.is_elastic:
            return []
        return [
            bundle
            for bundle in range(self.scaling.max_workers)
            if bundle not in taken and nodes.get(bundle) not in avoided
        ]

    def bundles_to_move(
        self,
        taken: Collection[int | None],
        nodes: Mapping[int, str],
        *,
        lost: Collection[str],
        avoided: Collection[str],
        free: Nodes,
    ) -> list[int]:
        """Return the bundles of a run of a fixed size that move to other nodes.

        Those on a lost node move if all do, or if there is room for them twice: Ray finds other
        room for a dead node's bundles too, and while it finds none, its control store is busy with
        nothing else. Devices are too expensive to be reserved twice.

        Args:
            nodes: the node of each bundle that has had an agent.
            lost: lost nodes that Ray takes for alive. It moves the bundles of others itself.
            free: free resources of all nodes that aren't lost.
        """
        if self.scaling.is_elastic:
            return []
        bundles = [each for each in range(self.scaling.max_workers) if each not in taken]
        of_lost = [each for each in bundles if nodes.get(each) in lost]
        if 0 < len(of_lost) < self.scaling.max_workers:
            others = [resources for node, resources in free.items() if node not in avoided]
            room = worker_capacity(others, self.scaling.resources).workers
            has_devices = not self.scaling.resources.keys() <= SHARED_RESOURCES
            if has_devices or room < 2 * len(of_lost):
                of_lost = []
        return of_lost + [each for each in bundles if nodes.get(each) in avoided]

    def nodes_for_moved(
        self, count: int, *, unusable: Collection[str], ranked_on: Collection[str], free: Nodes
    ) -> frozenset[str]:
        """Return the nodes on which bundles that move must not be, by the placement strategy.

        The moved ones are a group of their own, for which Ray observes the strategy. This is about
        them and the rest.

        Args:
            unusable: nodes on which no agent may be.
            ranked_on: the nodes of the other agents.
        """
        excluded = frozenset(unusable)
        apart = excluded | frozenset(ranked_on)
        if self.scaling.placement_strategy == "STRICT_SPREAD":
            return apart
        if self.scaling.placement_strategy == "SPREAD":
            others = [resources for node, resources in free.items() if node not in apart]
            if worker_capacity(others, self.scaling.resources).workers >= count:
                return apart
        return excluded

    def nodes_without_standby(self, ranked_on: Collection[str], free: Nodes) -> frozenset[str]:
        """Return the nodes that a standby avoids: those with ranks, if another node has room."""
        busy = frozenset(ranked_on)
        if not self.scaling.standby:
            return frozenset()
        has_room = any(
            holds(resources, self.scaling.resources)
            for node, resources in free.items()
            if node not in busy
        )
        return busy if has_room else frozenset()

    def is_worth_waiting(self, *, up: int, coming: int, size: int) -> bool:
        """Return whether a run waits briefly for agents, though it could continue with fewer.

        It would otherwise stay smaller until its next checkpoint.

        Args:
            size: workers of the last attempt; 0 before the first.
        """
        return coming > 0 and self.scaling.min_workers <= up < size

    def departure(
        self, agents: Mapping[int, str], avoid: Mapping[str, float], living: Nodes
    ) -> Departure:
        """Decide which agents leave the nodes to avoid: none if other nodes can't hold the workers.

        Nodes that are avoided only for a while hold workers before those that are left for good.

        Args:
            agents: the node of each agent that has arrived, by its number.
            avoid: node → the time from which it may get agents again.
        """
        for_good = frozenset(node for node, until in avoid.items() if until == math.inf)
        for avoided in (frozenset(avoid), for_good, frozenset[str]()):
            leaving = frozenset(number for number, node in agents.items() if node in avoided)
            others = [resources for node, resources in living.items() if node not in avoided]
            capacity = worker_capacity(others, self.scaling.resources).workers
            if not leaving or capacity >= self.scaling.min_workers:
                break
        staying = sum(node in avoid for node in agents.values()) - len(leaving)
        reason = ""
        if staying and not living.keys() <= avoid.keys():
            agents_stay = numbered(staying, "agent", "stay")
            reason = f"{agents_stay} on nodes that are to be left: no others can hold the workers"
        return Departure(leaving=leaving, avoided=avoided, reason=reason)

    def why_loss_is_final(self, kind: FailureKind, reason: str, losses: int) -> str | None:
        """Return why the loss of a requested agent fails the placement; None if it continues.

        Args:
            losses: number of consecutive losses, including this one.
        """
        if kind is FailureKind.STARTUP:
            return reason
        if self.may_request(losses):
            return None
        return (
            f"{losses} agents in a row were lost before a worker could use them, the last: {reason}"
        )

    def why_hopeless(
        self, outlook: Outlook, *, up_on: Sequence[str], coming: int, living: Nodes, free: Nodes
    ) -> str | None:
        """Return why the first attempt can't get enough agents; None if it may.

        That is so if no nodes are added and no other program can free resources. A run that has
        trained waits: its nodes may come back.

        Args:
            up_on: the nodes of the agents that have arrived.
        """
        to_come = coming - outlook.refused
        if len(up_on) + to_come >= self.scaling.min_workers:
            return None
        if not only_we_use(living, free, up_on, self.scaling.resources):
            return None
        return f"{self.shortage(outlook, free)}. {_IF_HOPELESS}"

    def awaited(
        self,
        outlook: Outlook | None,
        starting: Starting,
        free: Nodes,
        *,
        up: int,
        lost: Sequence[str] = (),
    ) -> str:
        """Return a sentence about what the run waits for.

        Args:
            lost: addresses of lost nodes that Ray takes for alive.
        """
        limit_s = self.scaling.start_timeout_s
        if up >= self.scaling.min_workers:
            # An elastic run could begin without the others.
            limit_s = min(limit_s, STARTING_S)
        if self._are_reserved(starting, up):
            return f"Waiting for workers, up to {limit_s:g} s: {starting}."
        said = self.shortage(outlook, free, up=up)
        also = f". Others have theirs: {starting}" if starting.hosts else ""
        if lost and not self.scaling.is_elastic:
            nodes = first_few(sorted(lost), NAMED_HOSTS, of="nodes")
            also += (
                f". Room is still reserved on {nodes}, lost: Ray looks for other room once it "
                "knows, within about a minute"
            )
        return f"Waiting for resources, up to {limit_s:g} s: {said}{also}."

    def why_late(self, outlook: Outlook | None, starting: Starting, free: Nodes, *, up: int) -> str:
        """Return why the workers could not be placed in time."""
        limit_s = self.scaling.start_timeout_s
        if self._are_reserved(starting, up) and starting.setup is not None:
            return (
                f"Ray has not set up {starting.setup} within {limit_s:g} s. Raise "
                "ScalingConfig(start_timeout_s=…), or install what it has on the nodes"
            )
        if self._are_reserved(starting, up):
            late = numbered(len(starting.hosts), "worker")
            return (
                f"Ray has not started the processes of {late} within {limit_s:g} s, on "
                f"{starting.nodes}, though their resources are reserved. Look at the load and "
                "Ray's logs there (/tmp/ray/session_latest/logs), or raise "
                "ScalingConfig(start_timeout_s=…)"
            )
        return (
            f"the workers could not be placed within {limit_s:g} s: "
            f"{self.shortage(outlook, free, up=up)}. Wait for other jobs, ask for fewer workers, "
            "or raise ScalingConfig(start_timeout_s=…)"
        )

    def _are_reserved(self, starting: Starting, up: int) -> bool:
        """Return whether all missing workers have their resources."""
        return len(starting.hosts) >= max(1, self.scaling.min_workers - up)

    def shortage(self, outlook: Outlook | None, free: Nodes, *, up: int = 0) -> str:
        """Return a description of the demand, the free resources and the autoscaler's statement."""
        resources = self.scaling.resources
        wanted = " and ".join(resource_amount(*each) for each in resources.items())
        has = ", ".join(
            resource_amount(name, sum(node.get(name, 0) for node in free.values()))
            for name in resources
        )
        nodes = numbered(len(free), "node")
        if self.scaling.label_selector:
            nodes += f" with labels that meet {self.scaling.label_selector}"
        workers = numbered(self.scaling.min_workers, "worker")
        have = f", {up} of them ready" if up else ""
        said = f"{workers} of {wanted} each{have}; the cluster has {has} free on {nodes}"
        return f"{said}; {outlook.says}" if outlook is not None else said


_EXCLUDING_LOSSES = 2
"""Losses within the cool-down that exclude a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a worker: its node and its time."""

    node: str
    at: float
    is_last: bool = False
    """Whether its node gets no workers any more, however long it is ago."""


def avoided(losses: Sequence[Loss], *, cooldown_s: float, now: float) -> dict[str, float]:
    """Return the nodes that get no workers at this time, and the time from which they do again.

    Args:
        cooldown_s: seconds for which a loss counts.
        now: seconds on the clock of the losses.
    """
    recent: dict[str, list[float]] = defaultdict(list)
    for loss in losses:
        if now - loss.at < cooldown_s:
            recent[loss.node].append(loss.at)
    often = {
        node: sorted(times)[-_EXCLUDING_LOSSES] + cooldown_s
        for node, times in recent.items()
        if len(times) >= _EXCLUDING_LOSSES
    }
    return often | {loss.node: math.inf for loss in losses if loss.is_last}
