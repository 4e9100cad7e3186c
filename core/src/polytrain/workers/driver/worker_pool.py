"""The pool of a run's agents: with ranks, on standby, and requested.

The pool never waits: arrivals and losses are events, and it reports when it is complete.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polytrain.config.configs import ScalingConfig
from polytrain.errors import FailureKind
from polytrain.events.attempt import (
    AgentLost,
    AgentsPlaced,
    DrainWanted,
    Event,
    PlacementFailed,
    Purpose,
)
from polytrain.policy.autoscaling import Outlook
from polytrain.policy.links import FailedLink, described, remedy_for
from polytrain.policy.placement import NodeAddress, PlacementPolicy
from polytrain.policy.scaling import (
    STARTING_S,
    Growth,
    SizePolicy,
    Starting,
    expected,
    worker_capacity,
)
from polytrain.workers.agents.agent_host import AgentHandle, Gone
from polytrain.workers.agents.node_checks import warnings_of_versions
from polytrain.workers.driver.group import AgentCluster, AgentLauncher
from polytrain.workers.driver.pool_state import AvoidedNodes, LostNodes, PoolAgents, RunBundles

logger = logging.getLogger(__name__)

_LOOK_S = 10.0
"""Seconds between two checks of the cluster while resources are missing. The first one is
logged, and what is new of the others."""

_VERDICT_S = 1.0
"""Seconds between two looks whether Ray takes a node for dead from which bundles have moved."""

_SETTLE_S = 0.5
"""Seconds after an arrival for which an elastic run waits for others, to start together."""

_OF_A_WHOLE_NODE = (FailureKind.NODE_LOST, FailureKind.PREEMPTED)
"""Losses of an agent by which all agents of its node are lost."""


@dataclass(slots=True, kw_only=True)
class _Placing:
    """The state while the pool acquires the workers of an attempt."""

    began_at: float
    room: int
    """Number of workers to begin with, if they arrive: those for which there was room."""

    look_at: float
    """Time of the next check for missing resources."""

    fail_at: float
    is_looked_for: bool = False
    """Whether the cluster has been checked once."""

    seemed_hopeless: bool = False
    """Whether it was hopeless by the last check, which may have been mistaken."""

    avoided_because: list[str] = field(default_factory=list)
    """Why nodes are avoided on which agents have died meanwhile."""

    said: set[str] = field(default_factory=set)
    """What the log says about missing resources."""

    verdict_at: float | None = None
    """Time of the next look at nodes from which bundles have moved; None if there are none."""

    settled_at: float | None = None
    """Time at which to start with the arrived agents; None if no others are waited for."""

    links_of: frozenset[str] | None = None
    """The nodes whose connections are being tried."""


class WorkerPool:
    """The agents of one run."""

    def __init__(
        self,
        scaling: ScalingConfig,
        *,
        launcher: AgentLauncher,
        cluster: AgentCluster,
        first_node: str,
        tell: Callable[[Event], None],
        tries_links: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            launcher: requests and ends agents.
            first_node: the node whose workers get the first ranks, if it has any.
            tell: called with an event when the pool is complete, can't be completed, or can grow.
                Handle these events before the next call of `lost`: ranks may have moved by then.
            tries_links: whether nodes connect to each other before they get the first ranks.
            clock: a monotonic clock, in seconds.
        """
        self.agents = PoolAgents()
        self._scaling = scaling
        self._policy = PlacementPolicy(scaling=scaling)
        self._sizes = SizePolicy(
            least=scaling.min_workers, most=scaling.max_workers, standby=scaling.standby
        )
        self._launcher = launcher
        self._cluster = cluster
        self._clock = clock
        self._first_node = first_node
        self._is_on_a_node = first_node in cluster.living_nodes()
        """Whether the driver's own host was a node of the cluster when the run began."""

        self._tell = tell
        self._losses = 0
        """Number of requested agents lost since the last arrival."""

        self._why_failed: str | None = None
        """The reason that workers can't start, once known."""

        self._avoided = AvoidedNodes(cluster.living_nodes)
        self._lost_nodes = LostNodes(living=cluster.living_nodes, clock=clock)
        self._bundles = RunBundles(self._policy, launcher.bundles)
        self._compared: set[str] = set()
        """Addresses of nodes whose versions were compared with the driver's."""

        self._placing: _Placing | None = None
        self._growth = Growth(self._sizes)
        self._tries_links = tries_links
        self._linked: frozenset[str] = frozenset()
        """Nodes that connect to each other."""

    @property
    def _has_enough(self) -> bool:
        """Whether the run could begin with the agents that have arrived."""
        return self.agents.up >= self._sizes.least

    def place(self, *, avoid: Mapping[str, float], without: frozenset[int]) -> None:
        """Complete the pool; see `WorkerGroup.place`."""
        now, scaling = self._clock(), self._scaling
        self._losses = 0
        self._growth.forget()
        self._placing = _Placing(
            began_at=now,
            room=worker_capacity([*self._free_nodes().values()], scaling.resources).workers,
            look_at=now + min(_LOOK_S, scaling.start_timeout_s),
            fail_at=now + scaling.start_timeout_s,
        )
        if not self.agents.ranked:
            self._bundles.reserve()
        self._dismiss_on_lost_nodes(self.agents.here)
        self._dismiss_avoided(avoid, without)
        self._start_if_complete()
        self._ask_for_reserved()

    @property
    def deadline(self) -> float | None:
        """The time at which to call `look_at_the_clock` again."""
        placing = self._placing
        if placing is None:
            at = min(self._growth.look_at, self._avoided.next_at)
            return at if at < math.inf else None
        if placing.settled_at is not None:
            return placing.settled_at
        looks = (placing.look_at, placing.fail_at, placing.verdict_at)
        return min(at for at in looks if at is not None)

    def arrived(self, agent_handle: AgentHandle, place: NodeAddress) -> None:
        """Note that an agent has arrived."""
        if agent_handle not in self.agents.coming:
            return
        del self.agents.coming[agent_handle]
        agent_handle.place = place
        self._lost_nodes.remove(place.node_id)
        if agent_handle.bundle is not None:
            self._bundles.arrived(agent_handle.bundle, place.node_id)
        self._losses = 0
        if place.node_id in self._avoided.nodes:
            # It was requested before its node became one to avoid.
            self._dismiss(agent_handle)
            self._ask_for_more()
            return
        if place.unusable is not None:
            self._reject(agent_handle, place.unusable)
            return
        self.agents.spares[agent_handle] = None
        if self._placing is not None:
            if self._policy.is_worth_waiting(
                up=self.agents.up, coming=len(self.agents.coming), size=len(self.agents.ranked)
            ):
                self._placing.settled_at = self._clock() + _SETTLE_S
            else:
                self._start_if_complete()
        else:
            self._request_growth()

    def _request_growth(self) -> None:
        """Request a restart with more workers, once for all those that are starting."""
        growth = self._growth.wanted(
            size=len(self.agents.ranked),
            up=self.agents.up,
            starting=self._launcher.starting,
            now=self._clock(),
        )
        if growth is not None:
            self._tell(DrainWanted(purpose=Purpose.RESIZE, reason=growth.reason))

    def _reject(self, agent_handle: AgentHandle, reason: str) -> None:
        """Reject a node: end the run if workers are missing, otherwise request another agent."""
        self._dismiss(agent_handle)
        if self._placing is not None and not (self.agents.ranked and self._has_enough):
            self._fail(reason)
            return
        logger.warning("No worker is placed on a node: %s.", reason)
        self._avoided.reject(agent_handle.place.node_id, reason)
        self._ask_for_more()

    def lost(self, gone: Gone) -> AgentLost | None:
        """Note that an agent is lost; return the event if it had a rank."""
        agent_handle, was_wanted = gone.agent_handle, not gone.agent_handle.is_gone
        agent_handle.is_gone = True
        # Don't count arrived agents: a node's loss takes many at once.
        self._losses += was_wanted and agent_handle in self.agents.coming
        rank = self.agents.forget(agent_handle)
        if not was_wanted:
            return None
        if gone.kind in _OF_A_WHOLE_NODE and agent_handle.place.node_id:
            is_news = self._lost_nodes.add(agent_handle.place, may_return=gone.node_may_return)
            # The others with a rank have to be reported to the attempt, which waits for their end.
            if is_news:
                self._dismiss_on_lost_nodes(
                    self.agents.spares if self._placing is None else self.agents.here
                )
        if rank is not None and self._placing is None:
            return AgentLost(rank=rank, kind=gone.kind, reason=gone.reason)
        if self._placing is None:
            # Log a reason that failed the placement only once: several agents may fail for it.
            if gone.reason != self._why_failed:
                logger.warning("An agent without a rank is lost: %s.", gone.reason)
            reason = self._policy.why_loss_is_final(gone.kind, gone.reason, self._losses)
            if reason is not None:
                self._goes_without(gone, reason)
            self._ask_for_more()
            self._request_growth()
        else:
            self._lost_while_placing(gone)
        return None

    def returned(self, node: str) -> None:
        """Note that a node answers again that was silent."""
        self._lost_nodes.remove(node)
        if self._placing is not None:
            self._ask_again(self._bundles.returned(node))

    def _lost_while_placing(self, gone: Gone) -> None:
        assert self._placing is not None
        if gone.kind is FailureKind.STARTUP:
            self._why_failed = gone.reason
        reason = self._policy.why_loss_is_final(gone.kind, gone.reason, self._losses)
        if reason is not None and self._goes_without(gone, reason):
            self._placing.avoided_because.append(reason)
            reason = None
            if self._has_enough:
                self._placing.room = self.agents.up
        if reason is None:
            self._start_if_complete()
            self._ask_for_reserved()
        else:
            self._fail(reason)

    def _goes_without(self, gone: Gone, reason: str) -> bool:
        """Avoid a node on which agents die while they start; return whether the run can."""
        if gone.kind is FailureKind.STARTUP:
            return False
        if not self._has_enough and not self._has_nodes_besides(gone.node):
            return False
        if gone.node is None:
            logger.warning("No more workers are requested: %s.", reason)
        else:
            # Others of its agents would die too. Another node may have room now, or later.
            logger.warning("No worker is placed on a node: %s.", reason)
            self._avoided.add(gone.node)
            self._losses = 0
        return True

    def _has_nodes_besides(self, node: str | None) -> bool:
        """Return whether the run may begin without a node: where agents start, they take longer."""
        if node is None or not self._scaling.is_elastic:
            return False
        without = self._avoided.nodes | {node}
        others = [
            each for name, each in self._cluster.living_nodes().items() if name not in without
        ]
        # Not a head without CPUs, or a node without GPUs.
        capacity = worker_capacity(others, self._scaling.resources)
        return capacity.workers >= self._scaling.min_workers

    def _fail(self, reason: str) -> None:
        self._placing = None
        self._tell(PlacementFailed(reason=reason))

    def dismiss_those_to_come(self) -> None:
        """Dismiss the requested agents."""
        self._dismiss_all(self.agents.coming)

    def look_at_the_clock(self) -> None:
        """Log which resources are missing, and fail the placement after the timeout."""
        placing, now = self._placing, self._clock()
        if placing is None:
            if now >= self._growth.look_at:
                self._request_growth()
            if self._avoided.drop_old(now):
                self.dismiss_those_to_come()
                self._ask_for_more()
            return
        if placing.settled_at is not None and now >= placing.settled_at:
            placing.settled_at = None
            self._start_if_complete()
            if self._placing is None:
                return
        if placing.verdict_at is not None and now >= placing.verdict_at:
            self._ask_again(self._bundles.move_back(self._cluster.living_nodes()))
            placing.verdict_at = now + _VERDICT_S if self._bundles.are_moving else None
        if now >= placing.look_at:
            self._look_for_missing(placing)
        if self._placing is not None and now >= placing.fail_at:
            late = self._policy.why_late(
                self._launcher.outlook(),
                self._launcher.starting(),
                self._free_nodes(),
                up=self.agents.up,
            )
            besides = [*self._avoided.rejected.values(), *placing.avoided_because]
            self._fail(". Besides, ".join([late, *dict.fromkeys(besides)]))

    def _look_for_missing(self, placing: _Placing) -> None:
        """Log missing resources once; fail the placement if they can't become available."""
        if self._is_on_a_node and self._first_node not in self._cluster.living_nodes():
            self._fail(
                "the cluster has given up the host of this driver, and with it all that the driver "
                "has requested. Start the script again: the run resumes"
            )
            return
        starting, now, up = self._launcher.starting(), self._clock(), self.agents.up
        begins_with = expected(
            up=up,
            starting=starting,
            waited_s=now - placing.began_at,
            limit_s=min(STARTING_S, self._scaling.start_timeout_s),
        )
        placing.room = begins_with.workers
        if not placing.is_looked_for and self._avoided.drop_all():
            # The others have no room after all.
            self.dismiss_those_to_come()
            self._ask_again(self._bundles.move_back())
        is_first = not self.agents.ranked
        self._start_if_complete()
        if self._placing is None:
            if is_first and starting.hosts and begins_with.workers == up:
                logger.warning("Training begins without some workers: %s.", begins_with.reason)
            return
        outlook = self._launcher.outlook()
        may_change = outlook is not None or starting.hosts or self._is_on_a_node
        placing.look_at = min(placing.fail_at, now + _LOOK_S if may_change else math.inf)
        hopeless = None if outlook is None or self.agents.ranked else self._why_hopeless(outlook)
        is_sure = placing.seemed_hopeless or (outlook is not None and outlook.is_certain)
        placing.seemed_hopeless = hopeless is not None
        if hopeless is not None and is_sure:
            self._fail(hopeless)
        else:
            self._warn_of_missing(placing, outlook, starting)
        placing.is_looked_for = True

    def _warn_of_missing(
        self, placing: _Placing, outlook: Outlook | None, starting: Starting
    ) -> None:
        """Log what the run waits for, and again when others say something new about it."""
        lost = self._lost_nodes.addresses()
        news = f"{outlook.says if outlook is not None else ''} {lost}"
        if news not in placing.said:
            placing.said.add(news)
            free = self._free_nodes()
            logger.warning(
                self._policy.awaited(outlook, starting, free, up=self.agents.up, lost=lost)
            )

    def _why_hopeless(self, outlook: Outlook) -> str | None:
        lost = self._lost_nodes.taken_for_alive()
        return self._policy.why_hopeless(
            outlook,
            up_on=self.agents.nodes,
            coming=len(self.agents.coming),
            living={
                node: total
                for node, total in self._cluster.living_nodes().items()
                if node not in lost
            },
            free=self._free_nodes(),
        )

    def _start_if_complete(self) -> None:
        """Assign ranks if there are enough agents."""
        assert self._placing is not None
        up = self.agents.up
        if self.agents.ranked:
            size = self._sizes.after_place(size=len(self.agents.ranked), up=up)
        else:
            size = self._sizes.first(up=up, room=self._placing.room)
        if size is not None and self._are_linked(size.workers):
            self._placing = None
            self._bundles.settle()
            self.agents.assign_ranks(size.workers, self._first_node)
            self._warn_of_versions()
            self._tell(AgentsPlaced(nodes=tuple(r.place.node_id for r in self.agents.ranked)))
        self._ask_for_more()

    def _warn_of_versions(self) -> None:
        """Log, once for each node, that it has other versions than the driver."""
        places = {agent_handle.place.host: agent_handle.place for agent_handle in self.agents.here}
        new = {
            host: place.other_versions
            for host, place in places.items()
            if host not in self._compared
        }
        self._compared.update(new)
        for warning in warnings_of_versions(new):
            logger.warning(warning)

    def links_tried(self, failed: Sequence[FailedLink]) -> None:
        """Note which connections have failed of those that were tried."""
        placing = self._placing
        if placing is None or placing.links_of is None:
            return
        if failed:
            self._fail(
                f"nodes can't connect to each other: {described(failed)}. {remedy_for(failed)}. "
                "`polytrain doctor --nodes all` tries the nodes of the cluster, and "
                "RunConfig(preflight='off') starts without this check"
            )
            return
        self._linked, placing.links_of = placing.links_of, None
        self._start_if_complete()

    def _are_linked(self, size: int) -> bool:
        """Return whether the workers' nodes may be used; before the first attempt, try them."""
        placing = self._placing
        if not self._tries_links or self.agents.ranked or placing is None:
            return True
        chosen = self.agents.here[:size]
        nodes = frozenset(each.place.node_id for each in chosen)
        if len(nodes) < 2 or nodes <= self._linked:
            return True
        if placing.links_of is None:
            placing.links_of = nodes
            self._launcher.try_links(chosen)
        return False

    def _ask_for_more(self) -> None:
        """Request the missing agents."""
        if not self._policy.may_request(self._losses):
            return
        if self._placing is not None:
            self._move_bundles(self._placing)
        others = self._ask_in_bundles(is_placing=self._placing is not None)
        if others > 0:
            lost = self._lost_nodes.taken_for_alive() - self._lost_nodes.silent
            avoid = self._nodes_without_standby().union(self._avoided.nodes, lost)
            for _ in range(others):
                self.agents.coming[self._launcher.ask(avoid=avoid)] = None

    def _ask_for_reserved(self) -> None:
        """Request agents for all reserved room, while the run waits for workers.

        Among those that are requested may be a standby whose room is never found.
        """
        is_waiting = self._placing is not None and self._policy.may_request(self._losses)
        if is_waiting and self._scaling.standby:
            self._ask_in_bundles(is_placing=False)

    def _ask_in_bundles(self, *, is_placing: bool) -> int:
        """Request missing agents in reserved bundles; return how many others are missing.

        Args:
            is_placing: see `PlacementPolicy.number_to_request`.
        """
        missing = self._policy.number_to_request(
            up=self.agents.up, coming=len(self.agents.coming), is_placing=is_placing
        )
        bundles = self._free_bundles()[:missing] if missing else []
        for bundle in bundles:
            self.agents.coming[self._launcher.ask(bundle=bundle)] = None
        return missing - len(bundles)

    def _free_bundles(self) -> list[int]:
        """Return the reserved bundles without an agent, those first that may get one soonest."""
        lost = self._lost_nodes.taken_for_alive()
        return self._bundles.free(self.agents.bundles, avoided=self._avoided.living(), lost=lost)

    def _free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        """Return the free resources of the nodes that aren't lost."""
        free, lost = self._cluster.free_nodes(), self._lost_nodes.taken_for_alive()
        return {node: resources for node, resources in free.items() if node not in lost}

    def _move_bundles(self, placing: _Placing) -> None:
        lost = self._lost_nodes.taken_for_alive()
        if not lost and not self._avoided.nodes:
            return
        # Agents that are requested on a lost node wait there as long as it is lost.
        waiting = self._bundles.on(lost).difference(each.bundle for each in self.agents.here)
        moved = self._bundles.move(
            self.agents.bundles - waiting,
            lost=lost,
            avoided=self._avoided.living(),
            may_return=self._lost_nodes.silent,
            ranked_on=self.agents.nodes,
            free=self._free_nodes(),
        )
        self._dismiss_all(each for each in self.agents.coming if each.bundle in moved)
        if self._bundles.are_moving:
            placing.verdict_at = self._clock() + _VERDICT_S

    def _ask_again(self, bundles: frozenset[int]) -> None:
        """Request agents of bundles anew."""
        self._dismiss_all(each for each in self.agents.coming if each.bundle in bundles)
        if bundles:
            self._ask_for_more()

    def _nodes_without_standby(self) -> frozenset[str]:
        if self._placing is not None or not self._scaling.standby:
            return frozenset()
        ranked_on = {agent_handle.place.node_id for agent_handle in self.agents.ranked}
        return self._policy.nodes_without_standby(ranked_on, self._free_nodes())

    def _dismiss_on_lost_nodes(self, agent_handles: Iterable[AgentHandle]) -> None:
        """Dismiss those of these agents that are on a lost node."""
        lost = self._lost_nodes.recent()
        self._dismiss_all(each for each in agent_handles if each.place.node_id in lost)

    def _dismiss_avoided(self, avoid: Mapping[str, float], without: frozenset[int]) -> None:
        """Dismiss agents on nodes to avoid, and of ranks to replace if others take them."""
        avoid = {**avoid, **dict.fromkeys(self._avoided.rejected, math.inf)}
        nodes = {
            agent_handle.number: agent_handle.place.node_id for agent_handle in self.agents.here
        }
        living = {} if avoid.keys().isdisjoint(nodes.values()) else self._cluster.living_nodes()
        departure = self._policy.departure(nodes, avoid, living)
        if departure.reason:
            logger.warning("%s.", departure.reason)
        self._avoided.change_to({node: avoid[node] for node in departure.avoided})
        leaving = [each for each in self.agents.here if each.number in departure.leaving]
        replaceable = sum(each.number not in departure.leaving for each in self.agents.spares)
        replaced = [self.agents.ranked[rank] for rank in sorted(without)[:replaceable]]
        self._dismiss_all({*leaving, *replaced})

    def _dismiss_all(self, agent_handles: Iterable[AgentHandle]) -> None:
        for agent_handle in [*agent_handles]:
            self._dismiss(agent_handle)

    def _dismiss(self, agent_handle: AgentHandle) -> None:
        agent_handle.is_gone = True
        self.agents.forget(agent_handle)
        self._launcher.dismiss(agent_handle)
