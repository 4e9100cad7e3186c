"""Workers on Ray: one agent per rank, some more on standby, and those that are yet to come."""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections import deque
from dataclasses import dataclass, replace

import ray

from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import ScalingConfig
from polytrain.data.assignment import RunDataset
from polytrain.data.spec import ShardSpec
from polytrain.data.stream import StreamSpec
from polytrain.policy.scaling import holds
from polytrain.run.events import DrainWanted, Event, Purpose
from polytrain.workers import cluster
from polytrain.workers.agent import AgentSpec
from polytrain.workers.crew import Crew
from polytrain.workers.group import Handler, Happening
from polytrain.workers.holdings import DataOffice
from polytrain.workers.job import LaunchOrder, TrainerJob
from polytrain.workers.node_watch import NodeWatch
from polytrain.workers.pickling import code_of_job, pickled_with
from polytrain.workers.placement import members
from polytrain.workers.recruits import Arrived, Delivery, Gone, Recruiter
from polytrain.workers.streams import Streams
from polytrain.workers.warm import WarmZygote, keep, warm_zygote
from polytrain.workers.zygote_client import ZygoteSpec
from polytrain_plugins import Demand, Member, Offer

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0

LEAVE_TIMEOUT_S = 60.0
"""Seconds that a trainer may take to end once every rank is done."""

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
    hang_timeout_s: float | None
    straggler_window_s: float | None
    datasets: tuple[RunDataset, ...]
    specs: tuple[ShardSpec | StreamSpec, ...]
    """Of the data sets, in the same order."""

    directory: str
    """The driver's working directory."""

    path: tuple[str, ...]
    """The driver's `sys.path`."""


class RayGroup:
    """A `WorkerGroup` of Ray actors. Ray must be initialised.

    Nothing here blocks: agents arrive, and are lost, as mail.
    """

    def __init__(self, spec: RayGroupSpec) -> None:
        self._spec = spec
        self._token = secrets.token_hex(8)
        self._node_id = ray.get_runtime_context().get_node_id()
        scaling, agent_spec = spec.scaling, self._describe_agents()
        # Frameworks import here while Ray still starts the actors.
        self._zygote = self._have_zygote_early(agent_spec.zygote)
        if self._zygote is not None:
            name = self._zygote.token
            agent_spec = replace(agent_spec, zygote=replace(agent_spec.zygote, name=name))
        self._mailbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._recruiter = Recruiter(
            spec=agent_spec,
            resources=scaling.resources,
            spread=scaling.placement_strategy == "SPREAD",
            mailbox=self._mailbox,
        )
        self._of_the_crew: deque[Event] = deque()
        self._crew = Crew(
            scaling,
            recruiter=self._recruiter,
            cluster=cluster,
            first_node=self._node_id,
            tell=self._of_the_crew.append,
        )
        self._data: DataOffice | None = None
        written = code_of_job(spec.job.training_function, spec.job.backend)
        self._job = pickled_with(*written, value=spec.job)
        held = {name: amount * scaling.max_workers for name, amount in scaling.resources.items()}
        self._streams = Streams(spec.datasets, held)
        self._nodes = NodeWatch(self._nodes_are_leaving)

    @property
    def members(self) -> tuple[Member, ...]:
        return members(
            [recruit.place for recruit in self._crew.ranked],
            cpus=self._spec.scaling.cpus_per_worker,
            gpus=self._spec.scaling.gpus_per_worker,
        )

    def place(self, *, avoid: frozenset[str], without: frozenset[int]) -> None:
        self._crew.place(avoid=avoid, without=without)

    def launch(self, order: LaunchOrder) -> None:
        self._seat(len(order.members))
        streams = self._streams.start()
        for recruit in self._crew.ranked:
            recruit.actor.launch.remote(recruit.seat, order, streams)

    def send_roster(self, generation: int, offers: tuple[Offer, ...]) -> None:
        for recruit in self._crew.ranked:
            recruit.actor.send_roster.remote(generation, offers)

    def drain(self, generation: int) -> None:
        for recruit in self._crew.ranked:
            recruit.actor.drain.remote(generation)

    def leave(self, generation: int) -> None:
        for recruit in self._crew.ranked:
            recruit.actor.leave.remote(generation)

    def kill(self, generation: int) -> None:
        for recruit in self._crew.ranked:
            recruit.actor.kill.remote(generation)

    def look_into(self, generation: int, *, pausing: bool) -> None:
        for recruit in self._crew.ranked:
            recruit.actor.look_into.remote(generation, pausing)

    def acknowledge(self, generation: int, checkpoint: int) -> None:
        for rank, recruit in enumerate(self._crew.ranked):
            if self._spec.job.writes_checkpoints(rank):
                recruit.actor.acknowledge.remote(generation, checkpoint)

    def wait(self, handle: Handler, timeout: float | None) -> None:
        if self._hear_the_crew(handle):
            timeout = 0.0
        try:
            mail = self._mailbox.get(timeout=self._patience(timeout))
            while True:
                for happening in mail:
                    self._take(happening, handle)
                    self._hear_the_crew(handle)
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            self._crew.look_at_the_clock()
            self._hear_the_crew(handle)

    def wake(self) -> None:
        self._mailbox.put(())

    def close(self) -> None:
        self._nodes.close()
        self._streams.close()
        self._crew.dismiss_those_to_come()
        released = [recruit.actor.release.remote() for recruit in self._crew.here]
        if released:
            ray.wait(released, num_returns=len(released), timeout=_CLOSE_TIMEOUT_S)
        if not self._recruiter.close(_CLOSE_TIMEOUT_S):
            logger.warning("Ray has not confirmed the end of all agents; they were killed.")
        if self._zygote is not None:
            if self._zygote.connection.is_open:
                keep(self._zygote)
            else:
                self._zygote.connection.close()

    def _describe_agents(self) -> AgentSpec:
        threads = str(self._spec.scaling.cpus_per_worker)
        environment = {
            **self._spec.demand.environment,
            "OMP_NUM_THREADS": threads,
        }
        zygote = ZygoteSpec(
            name=self._token,
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
            hang_timeout_s=self._spec.hang_timeout_s,
            straggler_window_s=self._spec.straggler_window_s,
            leave_timeout_s=LEAVE_TIMEOUT_S,
        )

    def _have_zygote_early(self, spec: ZygoteSpec) -> WarmZygote | None:
        if not holds(cluster.living_nodes().get(self._node_id, {}), self._spec.scaling.resources):
            return None
        return warm_zygote(replace(spec, name=""), self._node_id)

    def _take(self, happening: Happening | Arrived | Gone, handle: Handler) -> None:
        match happening:
            case Arrived(recruit=recruit, place=place):
                self._crew.arrived(recruit, place)
            case Gone():
                lost = self._crew.lost(happening)
                if lost is not None:
                    handle(lost)
            case _:
                handle(happening)

    def _hear_the_crew(self, handle: Handler) -> bool:
        """Pass on what the crew has told, before anything else; whether there was anything."""
        told = bool(self._of_the_crew)
        while self._of_the_crew:
            handle(self._of_the_crew.popleft())
        return told

    def _nodes_are_leaving(self, nodes: frozenset[str]) -> None:
        """Called by the watch's thread."""
        reason = f"{len(nodes)} node(s) are about to be taken away"
        self._mailbox.put((DrainWanted(purpose=Purpose.MOVE, reason=reason, nodes=nodes),))

    def _seat(self, world_size: int) -> None:
        """Have every agent at its rank, with the rank's data."""
        if self._zygote is not None and not any(
            recruit.place.node_id == self._node_id for recruit in self._crew.here
        ):
            # Not waited for: an agent that is yet to arrive here may be its client.
            self._zygote.connection.leave()
        # Not before: while the actors started, the zygotes could import.
        data = self._data = self._data or DataOffice(self._spec.datasets, self._spec.specs)
        for rank, recruit in enumerate(self._crew.ranked):
            if recruit.seat != (rank, world_size):
                recruit.seat = (rank, world_size)
                recruit.actor.prepare.remote(recruit.seat, self._job, data.order(world_size, rank))

    def _patience(self, timeout: float | None) -> float | None:
        deadline = self._crew.deadline
        if deadline is None:
            return timeout
        own = max(0.0, deadline - time.monotonic())
        return own if timeout is None else min(own, timeout)
