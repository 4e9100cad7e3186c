"""Workers on Ray: one agent per rank, in the bundles of one placement group."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import ScalingConfig
from polytrain.data.assignment import RunDataset
from polytrain.data.spec import ShardSpec
from polytrain.data.stream import StreamSpec
from polytrain.run.events import AgentLost, AgentsPlaced, Event, PlacementFailed
from polytrain.workers.agent import Agent, AgentPlace, AgentSpec
from polytrain.workers.cluster import free_resources, totals_of_node
from polytrain.workers.group import Handler
from polytrain.workers.holdings import DataOffice
from polytrain.workers.job import LaunchOrder, TrainerJob
from polytrain.workers.output import Output
from polytrain.workers.pickling import pickled_with
from polytrain.workers.placement import Place, members, rank_order
from polytrain.workers.streams import Streams
from polytrain.workers.zygote_client import ZygoteConnection, ZygoteSpec, zygote_name
from polytrain_plugins import Demand, Member, Offer

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0

_NOTICE_AFTER_S = 10.0
"""Seconds without all workers after which the user is told what is waited for."""

_AgentActor = ray.remote(Agent)

_Mail = Sequence[Event | Output]
"""What is told at once; nothing, only to wake the reader."""

# Imported in the zygotes of every run, and of those with data: Arrow's conversions use pandas.
_PRELOAD = ("polytrain.workers.trainer_process",)
_PRELOAD_WITH_DATA = ("pandas", "polytrain.data.opening")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayGroupSpec:
    """What the workers are to be like."""

    scaling: ScalingConfig
    demand: Demand
    job: TrainerJob
    store: CheckpointStore
    datasets: tuple[RunDataset, ...]
    specs: tuple[ShardSpec | StreamSpec, ...]
    """Of the data sets, in the same order."""

    directory: str
    """The driver's working directory."""

    path: tuple[str, ...]
    """The driver's `sys.path`."""


class RayGroup:
    """A `WorkerGroup` of Ray actors. Ray must be initialised."""

    def __init__(self, spec: RayGroupSpec) -> None:
        self._spec = spec
        self._token = secrets.token_hex(8)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._agent_spec = self._describe_agents()
        # Frameworks import here while Ray still starts the actors.
        self._zygote = self._start_zygote_early()
        self._data: DataOffice | None = None
        self._job = pickled_with(spec.job.training_function, value=spec.job)
        self._bundles: PlacementGroup | None = None
        self._bundle_of_rank: list[int] = []
        self._created: list[Any] = []
        self._agents: dict[int, Any] = {}
        self._places: dict[int, Place] = {}
        self._mailbox: queue.SimpleQueue[_Mail] = queue.SimpleQueue()
        self._listeners: list[threading.Thread] = []
        self._streams = Streams(spec.datasets, _times(spec.scaling.resources, self._world_size))

    @property
    def members(self) -> tuple[Member, ...]:
        resources = self._spec.scaling.resources
        return members(
            [self._places[rank] for rank in range(self._world_size)],
            cpus=self._spec.scaling.cpus_per_worker,
            gpus=int(resources.get("GPU", 0)),
        )

    def place(self) -> None:
        try:
            if not self._agents and not self._bundle_of_rank:
                self._place_all()
            else:
                self._replace_lost()
        except GetTimeoutError:
            self._tell(PlacementFailed(reason=self._why_not_placed()))
        except RayTaskError as error:
            self._tell(PlacementFailed(reason=f"{type(error.cause).__name__}: {error.cause}"))
        except RayError as error:
            self._tell(PlacementFailed(reason=str(error)))
        else:
            self._tell(AgentsPlaced())

    def launch(self, order: LaunchOrder) -> None:
        streams = self._streams.start()
        for agent in self._agents.values():
            agent.launch.remote(order, streams)

    def send_roster(self, generation: int, offers: tuple[Offer, ...]) -> None:
        for agent in self._agents.values():
            agent.send_roster.remote(generation, offers)

    def leave(self, generation: int) -> None:
        for agent in self._agents.values():
            agent.leave.remote(generation)

    def kill(self, generation: int) -> None:
        for agent in self._agents.values():
            agent.kill.remote(generation)

    def acknowledge(self, generation: int, checkpoint: int) -> None:
        for rank, agent in self._agents.items():
            if self._spec.job.writes_checkpoints(rank):
                agent.acknowledge.remote(generation, checkpoint)

    def wait(self, handle: Handler, timeout: float | None) -> None:
        try:
            mail = self._mailbox.get(timeout=timeout)
            while True:
                for happening in mail:
                    if isinstance(happening, AgentLost):
                        del self._agents[happening.rank]
                    handle(happening)
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            return

    def wake(self) -> None:
        self._mailbox.put(())

    def close(self) -> None:
        self._streams.close()
        released = [agent.release.remote() for agent in self._agents.values()]
        if released:
            ray.wait(released, num_returns=len(released), timeout=_CLOSE_TIMEOUT_S)
        for agent in self._created:
            ray.kill(agent)
        # Killed is not gone: what they hold is free once their streams have broken off.
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        if any(listener.is_alive() for listener in self._listeners):
            logger.warning("Ray has not confirmed the end of all agents; they were killed.")
        if self._bundles is not None:
            remove_placement_group(self._bundles)
        if self._zygote is not None:
            self._zygote.close()

    @property
    def _world_size(self) -> int:
        return self._spec.scaling.max_workers

    def _describe_agents(self) -> AgentSpec:
        threads = str(self._spec.scaling.cpus_per_worker)
        environment = {
            **self._spec.demand.environment,
            "OMP_NUM_THREADS": threads,
        }
        zygote = ZygoteSpec(
            name="",
            environment=environment,
            modules=(
                *_PRELOAD,
                *(_PRELOAD_WITH_DATA if self._spec.datasets else ()),
                *self._spec.demand.preload,
            ),
            path=self._spec.path,
        )
        return AgentSpec(
            token=self._token,
            zygote=zygote,
            environment=environment,
            directory=self._spec.directory,
            store=self._spec.store,
        )

    def _start_zygote_early(self) -> ZygoteConnection | None:
        if not _holds(totals_of_node(self._node_id), self._spec.scaling.resources):
            return None
        name = zygote_name(self._token, self._node_id)
        return ZygoteConnection(replace(self._agent_spec.zygote, name=name))

    def _place_all(self) -> None:
        scaling = self._spec.scaling
        self._bundles = placement_group(
            [scaling.resources] * self._world_size, strategy=scaling.placement_strategy
        )
        agents = [self._create(bundle) for bundle in range(self._world_size)]
        found = self._wait_for_places(agents)
        places = [Place(node_id=place.node_id, host=place.host) for place in found]
        order = rank_order(places, self._node_id)
        self._bundle_of_rank = order
        for rank, index in enumerate(order):
            self._agents[rank], self._places[rank] = agents[index], places[index]
        if self._zygote is not None and all(p.node_id != self._node_id for p in places):
            self._zygote.close()
            self._zygote = None
        self._prepare(range(self._world_size))

    def _replace_lost(self) -> None:
        lost = [rank for rank in range(self._world_size) if rank not in self._agents]
        agents = {rank: self._create(self._bundle_of_rank[rank]) for rank in lost}
        found = self._wait_for_places(list(agents.values()))
        for (rank, agent), place in zip(agents.items(), found, strict=True):
            self._agents[rank] = agent
            self._places[rank] = Place(node_id=place.node_id, host=place.host)
        self._prepare(lost)

    def _create(self, bundle: int) -> Any:
        assert self._bundles is not None
        resources = dict(self._spec.scaling.resources)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._bundles, placement_group_bundle_index=bundle
        )
        agent = _AgentActor.options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources,
            scheduling_strategy=strategy,
        ).remote(self._agent_spec)
        self._created.append(agent)
        return agent

    def _wait_for_places(self, agents: list[Any]) -> list[AgentPlace]:
        places = [agent.place.remote() for agent in agents]
        timeout = self._spec.scaling.start_timeout_s
        notice = min(timeout, _NOTICE_AFTER_S)
        _, waiting = ray.wait(places, num_returns=len(places), timeout=notice)
        if waiting:
            logger.warning("Waiting for resources: %s.", self._wanted_and_free())
        found: list[AgentPlace] = ray.get(places, timeout=timeout - notice)
        return found

    def _prepare(self, ranks: Iterable[int]) -> None:
        # Only now: while the actors started, the zygotes could import.
        data = self._data = self._data or DataOffice(self._spec.datasets, self._spec.specs)
        prepared = []
        for rank in ranks:
            agent = self._agents[rank]
            self._listen(rank, agent.events.options(num_returns="streaming").remote())
            order = data.order(self._world_size, rank)
            prepared.append(agent.prepare.remote(rank, self._job, order))
        ray.get(prepared)

    def _listen(self, rank: int, stream: Any) -> None:
        """Put what an agent tells into the mailbox, until it is gone."""

        def listen() -> None:
            try:
                for reference in stream:
                    self._mailbox.put(ray.get(reference))
            except RayError as error:
                self._tell(AgentLost(rank=rank, reason=_why_lost(error)))
            else:
                self._tell(AgentLost(rank=rank, reason="its actor has ended"))

        listener = threading.Thread(target=listen, name=f"polytrain-rank-{rank}", daemon=True)
        self._listeners.append(listener)
        listener.start()

    def _tell(self, event: Event) -> None:
        self._mailbox.put((event,))

    def _why_not_placed(self) -> str:
        return (
            f"the workers could not be placed within {self._spec.scaling.start_timeout_s:g} s: "
            f"{self._wanted_and_free()}. Wait for other jobs, ask for fewer workers, or raise "
            "ScalingConfig(start_timeout_s=…)"
        )

    def _wanted_and_free(self) -> str:
        resources = self._spec.scaling.resources
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
        free = free_resources()
        has = ", ".join(f"{free.get(name, 0):g} {name}" for name in resources)
        return f"{self._world_size} workers of {wanted} each; the cluster has {has} free"


def _times(resources: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: amount * count for name, amount in resources.items()}


def _holds(totals: Mapping[str, float], demand: Mapping[str, float]) -> bool:
    return all(totals.get(name, 0) >= amount for name, amount in demand.items())


def _why_lost(error: Exception) -> str:
    first_lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return first_lines[0] if first_lines else type(error).__name__
