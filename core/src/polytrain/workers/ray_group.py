"""Workers on Ray: one agent per rank, some more on standby, and those that are yet to come."""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import ray

from polytrain.checkpoint.store import CheckpointStore
from polytrain.config import ScalingConfig
from polytrain.data.assignment import RunDataset
from polytrain.data.spec import ShardSpec
from polytrain.data.stream import StreamSpec
from polytrain.policy.scaling import SizePolicy, largest_fit
from polytrain.run.events import (
    AgentLost,
    AgentsPlaced,
    DrainWanted,
    Event,
    PlacementFailed,
    Purpose,
)
from polytrain.workers.agent import AgentSpec
from polytrain.workers.cluster import (
    free_nodes,
    free_resources,
    living_nodes,
)
from polytrain.workers.group import Handler, Happening
from polytrain.workers.holdings import DataOffice
from polytrain.workers.job import LaunchOrder, TrainerJob
from polytrain.workers.node_watch import NodeWatch
from polytrain.workers.pickling import pickled_with
from polytrain.workers.placement import Place, members, rank_order
from polytrain.workers.recruits import Arrived, Gone, Mail, Recruit, Recruiter
from polytrain.workers.streams import Streams
from polytrain.workers.zygote_client import ZygoteConnection, ZygoteSpec, zygote_name
from polytrain_plugins import Demand, Member, Offer

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0

_NOTICE_AFTER_S = 10.0
"""Seconds without all workers after which the user is told what is waited for."""

_SETBACKS = 3
"""Agents that may be lost while the workers are placed."""

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
    datasets: tuple[RunDataset, ...]
    specs: tuple[ShardSpec | StreamSpec, ...]
    """Of the data sets, in the same order."""

    directory: str
    """The driver's working directory."""

    path: tuple[str, ...]
    """The driver's `sys.path`."""


@dataclass(slots=True, kw_only=True)
class _Placing:
    """What is known while the workers of a generation come together."""

    room: int
    """Workers that there was room for."""

    notice_at: float | None
    """When to tell the user that it takes long; None once it is done."""

    give_up_at: float


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
        self._zygote = self._start_zygote_early(agent_spec.zygote)
        self._sizes = SizePolicy(
            least=scaling.min_workers, most=scaling.max_workers, standby=scaling.standby
        )
        self._mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._recruiter = Recruiter(
            spec=agent_spec, resources=scaling.resources, mailbox=self._mailbox
        )
        self._ranked: list[Recruit] = []
        """Agents of the last generation, by rank; some may be gone."""

        self._spares: list[Recruit] = []
        """Agents that are there and have no rank."""

        self._coming: list[Recruit] = []
        """Agents that have been asked for."""

        self._size = 0
        self._setbacks = 0
        """Agents that were lost since one has arrived."""

        self._avoided: frozenset[str] = frozenset()
        self._bundle_nodes: dict[int, str] = {}
        self._placing: _Placing | None = None
        self._data: DataOffice | None = None
        self._job = pickled_with(spec.job.training_function, value=spec.job)
        held = {name: amount * scaling.max_workers for name, amount in scaling.resources.items()}
        self._streams = Streams(spec.datasets, held)
        self._nodes = NodeWatch(self._nodes_are_leaving)

    @property
    def members(self) -> tuple[Member, ...]:
        return members(
            [_place_of(recruit) for recruit in self._ranked],
            cpus=self._spec.scaling.cpus_per_worker,
            gpus=int(self._spec.scaling.resources.get("GPU", 0)),
        )

    def place(self, *, avoid: frozenset[str], without: frozenset[int]) -> None:
        now, scaling = time.monotonic(), self._spec.scaling
        self._placing = _Placing(
            room=self._room(),
            notice_at=now + min(_NOTICE_AFTER_S, scaling.start_timeout_s),
            give_up_at=now + scaling.start_timeout_s,
        )
        if not self._size and not scaling.is_elastic:
            self._recruiter.reserve(scaling.max_workers, scaling.placement_strategy)
        self._leave(avoid, without)
        self._staff()

    def launch(self, order: LaunchOrder) -> None:
        streams = self._streams.start()
        for recruit in self._ranked:
            recruit.actor.launch.remote(order, streams)

    def send_roster(self, generation: int, offers: tuple[Offer, ...]) -> None:
        for recruit in self._ranked:
            recruit.actor.send_roster.remote(generation, offers)

    def drain(self, generation: int) -> None:
        for recruit in self._ranked:
            recruit.actor.drain.remote(generation)

    def leave(self, generation: int) -> None:
        for recruit in self._ranked:
            recruit.actor.leave.remote(generation)

    def kill(self, generation: int) -> None:
        for recruit in self._ranked:
            recruit.actor.kill.remote(generation)

    def look_into(self, generation: int) -> None:
        for recruit in self._ranked:
            recruit.actor.look_into.remote(generation)

    def acknowledge(self, generation: int, checkpoint: int) -> None:
        for rank, recruit in enumerate(self._ranked):
            if self._spec.job.writes_checkpoints(rank):
                recruit.actor.acknowledge.remote(generation, checkpoint)

    def wait(self, handle: Handler, timeout: float | None) -> None:
        try:
            mail = self._mailbox.get(timeout=self._patience(timeout))
            while True:
                for happening in mail:
                    self._take(happening, handle)
                mail = self._mailbox.get_nowait()
        except queue.Empty:
            self._look_at_the_clock()

    def wake(self) -> None:
        self._mailbox.put(())

    def close(self) -> None:
        self._nodes.close()
        self._streams.close()
        released = [recruit.actor.release.remote() for recruit in self._here]
        if released:
            ray.wait(released, num_returns=len(released), timeout=_CLOSE_TIMEOUT_S)
        if not self._recruiter.close(_CLOSE_TIMEOUT_S):
            logger.warning("Ray has not confirmed the end of all agents; they were killed.")
        if self._zygote is not None:
            self._zygote.close()

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
            hang_timeout_s=self._spec.hang_timeout_s,
            leave_timeout_s=LEAVE_TIMEOUT_S,
        )

    def _start_zygote_early(self, spec: ZygoteSpec) -> ZygoteConnection | None:
        if not _holds(living_nodes().get(self._node_id, {}), self._spec.scaling.resources):
            return None
        return ZygoteConnection(replace(spec, name=zygote_name(self._token, self._node_id)))

    def _take(self, happening: Happening | Arrived | Gone, handle: Handler) -> None:
        match happening:
            case Arrived(recruit=recruit, place=place):
                self._arrived(recruit, place)
            case Gone():
                lost = self._lost(happening)
                if lost is not None:
                    handle(lost)
            case _:
                handle(happening)

    def _arrived(self, recruit: Recruit, place: Place) -> None:
        if recruit not in self._coming:
            return
        self._coming.remove(recruit)
        recruit.place = place
        if recruit.bundle is not None:
            self._bundle_nodes[recruit.bundle] = place.node_id
        self._setbacks = 0
        self._spares.append(recruit)
        if self._placing is not None:
            self._staff()
        else:
            growth = self._sizes.growth(size=self._size, up=len(self._here))
            if growth is not None:
                self._tell(DrainWanted(purpose=Purpose.RESIZE, reason=growth.reason))

    def _lost(self, gone: Gone) -> AgentLost | None:
        """Note that an agent isn't there any more; what to tell if it had a rank."""
        recruit, was_wanted = gone.recruit, not gone.recruit.is_gone
        recruit.is_gone = True
        for recruits in (self._spares, self._coming):
            if recruit in recruits:
                recruits.remove(recruit)
        if not was_wanted:
            return None
        if recruit in self._ranked and self._placing is None:
            rank = self._ranked.index(recruit)
            return AgentLost(rank=rank, kind=gone.kind, reason=gone.reason)
        self._setbacks += 1
        if self._placing is None:
            logger.warning("An agent without a rank is lost: %s.", gone.reason)
            self._ask_for_more()
        elif self._setbacks > _SETBACKS:
            self._placing = None
            self._tell(PlacementFailed(reason=f"agents don't stay: {gone.reason}"))
        else:
            self._staff()
        return None

    @property
    def _here(self) -> list[Recruit]:
        """The agents that are there, those with a rank first."""
        return [recruit for recruit in self._ranked if not recruit.is_gone] + self._spares

    def _staff(self) -> None:
        """Share the ranks out, if there are enough agents for it."""
        assert self._placing is not None
        up = len(self._here)
        if self._size:
            size = self._sizes.after_place(size=self._size, up=up)
        else:
            size = self._sizes.first(up=up, room=self._placing.room)
        if size is not None:
            self._placing = None
            self._seat(size.workers)
            self._tell(AgentsPlaced(nodes=tuple(_place_of(r).node_id for r in self._ranked)))
        self._ask_for_more()

    def _seat(self, size: int) -> None:
        """Give every rank an agent, which gets the rank's data at hand."""
        spares = list(self._spares)
        if size == len(self._ranked):
            # Whoever stays keeps its rank, and so its data.
            self._ranked = [spares.pop(0) if r.is_gone else r for r in self._ranked]
        else:
            chosen = self._here[:size]
            order = rank_order([_place_of(recruit) for recruit in chosen], self._node_id)
            self._ranked = [chosen[index] for index in order]
        self._spares = [recruit for recruit in self._spares if recruit not in self._ranked]
        self._size = size
        if self._zygote is not None and all(
            _place_of(recruit).node_id != self._node_id for recruit in self._here
        ):
            self._zygote.close()
            self._zygote = None
        # Not before: while the actors started, the zygotes could import.
        data = self._data = self._data or DataOffice(self._spec.datasets, self._spec.specs)
        for rank, recruit in enumerate(self._ranked):
            if recruit.seat != (rank, size):
                recruit.seat = (rank, size)
                recruit.actor.prepare.remote(rank, self._job, data.order(size, rank))

    def _ask_for_more(self) -> None:
        """Ask for the agents that are missing: workers first, standbys when these are there."""
        scaling = self._spec.scaling
        wanted = scaling.max_workers
        if scaling.is_elastic or self._placing is None:
            wanted += scaling.standby
        if self._setbacks > _SETBACKS:
            return
        bundles = [] if scaling.is_elastic else self._free_bundles()
        for _ in range(wanted - len(self._here) - len(self._coming)):
            if bundles:
                recruit = self._recruiter.ask(bundle=bundles.pop(0))
            else:
                recruit = self._recruiter.ask(avoid=self._avoided | self._busy_nodes())
            self._coming.append(recruit)

    def _free_bundles(self) -> list[int]:
        taken = {recruit.bundle for recruit in (*self._here, *self._coming)}
        return [
            bundle
            for bundle in range(self._spec.scaling.max_workers)
            if bundle not in taken and self._bundle_nodes.get(bundle) not in self._avoided
        ]

    def _busy_nodes(self) -> frozenset[str]:
        """The nodes that a standby is better not on, if others have room for it."""
        if self._placing is not None or not self._spec.scaling.standby:
            return frozenset()
        busy = frozenset(_place_of(recruit).node_id for recruit in self._ranked)
        others = {node: free for node, free in free_nodes().items() if node not in busy}
        demand = self._spec.scaling.resources
        return busy if any(_holds(free, demand) for free in others.values()) else frozenset()

    def _leave(self, avoid: frozenset[str], without: frozenset[int]) -> None:
        """Send agents away from where they mustn't be, if there is another place for them."""
        unwanted = [recruit for recruit in self._here if _place_of(recruit).node_id in avoid]
        if unwanted:
            others = [total for node, total in living_nodes().items() if node not in avoid]
            if largest_fit(others, self._spec.scaling.resources).workers < self._sizes.least:
                logger.warning(
                    "%d agents stay on nodes that they should leave: no others can hold them.",
                    len(unwanted),
                )
                unwanted, avoid = [], frozenset()
        self._avoided = avoid
        replaceable = len([recruit for recruit in self._spares if recruit not in unwanted])
        ranked = [self._ranked[rank] for rank in sorted(without)[:replaceable]]
        for recruit in {*unwanted, *ranked}:
            self._dismiss(recruit)

    def _dismiss(self, recruit: Recruit) -> None:
        recruit.is_gone = True
        if recruit in self._spares:
            self._spares.remove(recruit)
        self._recruiter.dismiss(recruit)

    def _nodes_are_leaving(self, nodes: frozenset[str]) -> None:
        """Called by the watch's thread."""
        reason = f"{len(nodes)} nodes are about to be taken away"
        self._tell(DrainWanted(purpose=Purpose.MOVE, reason=reason, nodes=nodes))

    def _patience(self, timeout: float | None) -> float | None:
        if self._placing is None:
            return timeout
        at = self._placing.notice_at or self._placing.give_up_at
        own = max(0.0, at - time.monotonic())
        return own if timeout is None else min(own, timeout)

    def _look_at_the_clock(self) -> None:
        placing, now = self._placing, time.monotonic()
        if placing is None:
            return
        if placing.notice_at is not None and now >= placing.notice_at:
            placing.notice_at = None
            # What is there by now is what there is.
            placing.room = len(self._here)
            self._staff()
            if self._placing is not None:
                logger.warning("Waiting for resources: %s.", self._wanted_and_free())
        if self._placing is not None and now >= placing.give_up_at:
            self._placing = None
            self._tell(PlacementFailed(reason=self._why_not_placed()))

    def _tell(self, event: Event) -> None:
        self._mailbox.put((event,))

    def _room(self) -> int:
        free = free_resources()
        return largest_fit([free], self._spec.scaling.resources).workers

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
        least = self._spec.scaling.min_workers
        return f"{least} workers of {wanted} each; the cluster has {has} free"


def _place_of(recruit: Recruit) -> Place:
    assert recruit.place is not None, "an agent that hasn't arrived has no place"
    return recruit.place


def _holds(totals: Mapping[str, float], demand: Mapping[str, float]) -> bool:
    return all(totals.get(name, 0) >= amount for name, amount in demand.items())
