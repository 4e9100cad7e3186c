"""A group of workers with agents: one per rank, some on standby, some requested."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from polytrain.config.listening import ports_of, too_few_ports
from polytrain.config.run_spec import RunSpec
from polytrain.config.runtime_env import parts_of_ray
from polytrain.events.attempt import AgentsPlaced, Event, PlacementFailed, move_wanted
from polytrain.events.driver import DriverEvent
from polytrain.events.notices import LeavingNode
from polytrain.policy.copies import neighbours
from polytrain.policy.placement import members
from polytrain.policy.scaling import holds
from polytrain.workers.agents.agent_host import (
    AgentHandle,
    Arrived,
    Gone,
    LinksTried,
    NodeReturned,
    PoolEvent,
)
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import (
    AgentEvent,
    Call,
    FetchShared,
    LaunchProcess,
    RankAssignment,
)
from polytrain.workers.driver.group import AgentCluster, Handler, Mailbox, arrived
from polytrain.workers.driver.worker_pool import WorkerPool
from polytrain.workers.processes.cache import KeptZygote, keep, kept_or_new_zygote
from polytrain.workers.processes.zygote_connection import ZygoteSpec, zygote_name
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain_plugins import Demand, Member

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset
    from polytrain.data.shards.spec import DatasetSpec
    from polytrain.workers.agents.shard_cache import ShardCachePlanner

_CLOSE_TIMEOUT_S = 10.0


class AgentGroup:
    """A `WorkerGroup` of agents, on Ray or in the driver.

    Only `wait` blocks: arrivals and losses of agents are events in a mailbox.
    """

    def __init__(
        self,
        *,
        run: RunSpec,
        demand: Demand,
        datasets: Sequence[RunDataset],
        specs: Sequence[DatasetSpec],
        agents: AgentSpec,
        cluster: AgentCluster,
        mailbox: Mailbox,
    ) -> None:
        """
        Args:
            specs: specs of the data sets, in the same order.
            agents: the settings of the agents.
            mailbox: the driver's mailbox, also for what isn't the group's.
        """
        self._run = run
        self._demand = demand
        self._datasets, self._specs = datasets, specs
        self._cluster = cluster
        self._node_id = cluster.node_id
        scaling = run.scaling_config
        # Start the zygote early, to import frameworks while agents start.
        self._zygote = self._have_zygote_early(agents.zygote)
        if self._zygote is not None:
            agents = replace(agents, zygote=replace(agents.zygote, name=self._zygote.token))
        self._zygote_spec = agents.zygote
        self._mailbox = mailbox
        job = WorkerJob.of(run, agents.store).pickled()
        self._launcher = cluster.launcher(agents, job, scaling, self._mailbox)
        self._of_the_pool: deque[Event] = deque()
        self._pool = WorkerPool(
            scaling,
            launcher=self._launcher,
            cluster=cluster,
            first_node=self._node_id,
            tell=self._take_from_pool,
            tries_links=run.run_config.preflight == "links",
        )
        self._members: tuple[Member, ...] = ()
        self._data: ShardCachePlanner | None = None
        held = {name: amount * scaling.max_workers for name, amount in scaling.resources.items()}
        self._streams = cluster.streams(datasets, held)
        self._nodes = cluster.watch(self._nodes_are_leaving)

    @property
    def members(self) -> tuple[Member, ...]:
        return self._members

    @property
    def zygote(self) -> ZygoteSpec:
        """The zygote of the driver's node."""
        name = zygote_name(self._zygote_spec.name, self._node_id)
        return replace(self._zygote_spec, name=name)

    def place(self, *, avoid: Mapping[str, float], without: frozenset[int]) -> None:
        self._pool.place(avoid=avoid, without=without)

    def launch(self, order: LaunchOrder) -> None:
        self._let_zygote_go_if_unused()
        streams = self._streams.start()
        assignments = self._new_assignments(len(order.members))
        if self._run.run_config.checkpoint_config.memory is not None:
            ranked = self._pool.agents.ranked
            others = neighbours([each.place.node_id for each in ranked])
            self._launcher.introduce(
                {
                    each: None if other is None else ranked[other]
                    for each, other in zip(ranked, others, strict=True)
                }
            )
        self._launcher.call(
            LaunchProcess(order=order, streams=streams),
            {each: assignments.get(each) for each in self._pool.agents.ranked},
        )
        self._have_shared_fetched()

    def call(self, call: Call, ranks: Collection[int] | None = None) -> None:
        ranked = self._pool.agents.ranked
        if ranks is None:
            self._launcher.call(call, dict.fromkeys(ranked))
        else:
            self._launcher.call(call, {ranked[rank]: None for rank in ranks if rank < len(ranked)})

    def wait(self, handle: Handler, timeout: float | None) -> None:
        if self._update_pool(handle):
            timeout = 0.0
        for event in arrived(self._mailbox, self._wait_limit(timeout)):
            self._take(event, handle)
            self._update_pool(handle)
        deadline = self._pool.deadline
        if deadline is not None and time.monotonic() >= deadline:
            self._pool.look_at_the_clock()
            self._update_pool(handle)

    def close(self) -> None:
        self._nodes.close()
        self._streams.close()
        self._pool.dismiss_those_to_come()
        self._launcher.close(_CLOSE_TIMEOUT_S)
        if self._data is not None:
            self._data.close()
        if self._zygote is not None:
            if self._zygote.connection.is_open:
                keep(self._zygote)
            else:
                self._zygote.connection.close()

    def _have_zygote_early(self, spec: ZygoteSpec) -> KeptZygote | None:
        if parts_of_ray(self._run.run_config.worker_runtime_env):
            # The zygote would inherit this process's environment, not the runtime environment.
            return None
        if not holds(
            self._cluster.living_nodes().get(self._node_id, {}),
            self._run.scaling_config.resources,
        ):
            return None
        # It must import with the variables that worker processes get from agents.
        variables = {**self._cluster.variables, **spec.variables}
        return kept_or_new_zygote(replace(spec, name="", variables=variables), self._node_id)

    def _take(self, event: AgentEvent | DriverEvent | PoolEvent, handle: Handler) -> None:
        if not isinstance(event, PoolEvent):
            handle(event)
            return
        match event:
            case Arrived(agent_handle=agent_handle, place=place):
                self._pool.arrived(agent_handle, place)
                self._have_shared_fetched()
            case LinksTried(failed=failed):
                self._pool.links_tried(failed)
            case NodeReturned(node_id=node_id):
                self._pool.returned(node_id)
            case Gone():
                self._launcher.dismiss(event.agent_handle)
                lost = self._pool.lost(event)
                if lost is not None:
                    handle(lost)

    def _take_from_pool(self, event: Event) -> None:
        if isinstance(event, AgentsPlaced):
            scaling, ports = self._run.scaling_config, self._run.run_config.ports
            self._members = members(
                [agent_handle.place for agent_handle in self._pool.agents.ranked],
                cpus=scaling.cpus_per_worker,
                gpus=scaling.gpus_per_worker,
                ports=ports_of(ports),
            )
            why_not = too_few_ports(ports, self._demand, self._members)
            event = event if why_not is None else PlacementFailed(reason=why_not)
        self._of_the_pool.append(event)

    def _update_pool(self, handle: Handler) -> bool:
        """Pass on the pool's events before all others; return whether there were any."""
        had_events = bool(self._of_the_pool)
        while self._of_the_pool:
            handle(self._of_the_pool.popleft())
        return had_events

    def _nodes_are_leaving(self, nodes: Mapping[str, LeavingNode]) -> None:
        """Request a drain for leaving nodes; called by the watch's thread."""
        self._mailbox.put((move_wanted(nodes),))

    def _let_zygote_go_if_unused(self) -> None:
        if self._zygote is not None and not any(
            agent_handle.place.node_id == self._node_id for agent_handle in self._pool.agents.here
        ):
            # Don't wait for its end: an agent that hasn't arrived yet may be its client.
            self._zygote.connection.leave()

    def _new_assignments(self, world_size: int) -> dict[AgentHandle, RankAssignment]:
        """Return the assignments of agents that get another rank."""
        # Plan late: while the actors started, the zygotes could import.
        data = self._data = self._data or self._planner()
        assignments = {}
        for rank, agent_handle in enumerate(self._pool.agents.ranked):
            if agent_handle.assigned != (rank, world_size):
                agent_handle.assigned = (rank, world_size)
                request = None if data is None else data.request(world_size, rank)
                assignments[agent_handle] = RankAssignment(
                    rank=rank, world_size=world_size, data=request
                )
        return assignments

    def _planner(self) -> ShardCachePlanner | None:
        if not self._datasets:
            return None
        # Import it late: importing Arrow takes a while.
        from polytrain.workers.agents.shard_cache import ShardCachePlanner

        return ShardCachePlanner(self._datasets, self._specs, self._cluster)

    def _have_shared_fetched(self) -> None:
        """Have agents without a rank fetch what all ranks need, before one gets a rank."""
        if self._data is None:
            return
        new = [each for each in self._pool.agents.spares if not each.is_fetching]
        for agent_handle in new:
            agent_handle.is_fetching = True
        if new:
            self._launcher.call(FetchShared(shared=self._data.shared), dict.fromkeys(new))

    def _wait_limit(self, timeout: float | None) -> float | None:
        deadline = self._pool.deadline
        if deadline is None:
            return timeout
        left_s = max(0.0, deadline - time.monotonic())
        return left_s if timeout is None else min(timeout, left_s)
