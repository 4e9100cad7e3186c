"""Hosts that answer a driver's calls without processes, for runs of thousands of workers.

Everything of the driver is real: `Trainer.fit`, the controller, the group and the pool of agents,
checkpoints in a real directory, the journal. Only its cluster is simulated, at `AgentCluster`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from polytrain import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, Trainer
from polytrain.backends.reference import Reference
from polytrain.checkpoint.manifest import StoredFile, directory_name
from polytrain.checkpoint.parts import PartStaged, PartStored
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    Done,
    Drained,
    Exited,
    Failed,
    Joined,
    Load,
    Offered,
    Reported,
    Started,
    WorkerStatus,
)
from polytrain.events.notices import LeavingNode
from polytrain.linux.progress_page import WorkerStage
from polytrain.policy.placement import NodeAddress
from polytrain.policy.scaling import Starting
from polytrain.workers.agents.agent_host import AgentHandle, Arrived, Delivery, Gone, LinksTried
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import (
    Acknowledge,
    AgentCall,
    DrainAttempt,
    Kill,
    LaunchProcess,
    Leave,
    RankAssignment,
    SendRoster,
    StoreRest,
)
from polytrain.workers.driver.group import Bundles
from polytrain.workers.driver.local_cluster import Nothing
from polytrain_plugins import Offer

PER_HOST = 8

_SPARE_HOSTS = 2
"""Hosts without workers at first: one is for those of a lost host, one for those of a drained."""

_CONTENT = b"a part"
_DIGEST = hashlib.sha256(_CONTENT).hexdigest()

Story = Iterator[str | None]
"""What happens to the workers: yields the name of each part that begins, or None to wait for what
the driver does about it."""


class Mailbox:
    """The driver's mailbox. Each delivery wakes the driver by itself, which costs it the most."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.when_empty: Callable[[], None] = lambda: None

    def put(self, delivery: Delivery) -> None:
        self._queue.put(delivery)

    def get(self, timeout: float | None = None) -> Delivery:
        if self._queue.empty():
            self.when_empty()
        return self._queue.get(timeout=timeout)

    def get_nowait(self) -> Delivery:
        raise queue.Empty

    def qsize(self) -> int:
        return 0

    def empty(self) -> bool:
        return self._queue.empty()


@dataclass(eq=False)
class _Agent:
    handle: AgentHandle
    host: int
    rank: int = -1
    is_alive: bool = False
    """Whether it has a worker process."""


@dataclass
class SimulatedHosts(Bundles):
    """A cluster of hosts and its launcher, and what happens to them."""

    workers: int
    tell_story: Callable[[SimulatedHosts], Story]
    mailbox: Mailbox = field(default_factory=Mailbox)
    node_id: str = "head"
    reference_type: tuple[type, ...] = ()
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of agents, by their kind."""

    messages: Counter[str] = field(default_factory=Counter)
    """Messages to hosts, by the kind of the calls in them."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Part of the story → CPU seconds of the driver, without those of the simulation."""

    own_s: float = 0.0
    """CPU seconds of the simulation."""

    acknowledged: set[int] = field(default_factory=set)
    """Ranks whose last part is committed."""

    joined: int = 0
    attempt: int = -1
    on_part: Callable[[str], None] = lambda part: None
    """Called when a part of the story begins."""

    def __post_init__(self) -> None:
        self.bundles = self
        self._agents: dict[int, _Agent] = {}
        self._numbers = itertools.count()
        hosts = -(-self.workers // PER_HOST) + _SPARE_HOSTS
        self._free = dict.fromkeys(range(hosts), PER_HOST)
        self._alive_hosts = set(self._free)
        self._bundles: dict[int, int] = {}
        self._story = self.tell_story(self)
        self._part: tuple[str, float] | None = None
        self._ranks: dict[int, _Agent] = {}
        self._tell_of_nodes: Callable[[Mapping[str, LeavingNode]], None] = lambda nodes: None
        self._order: Any = None
        self._is_over = False
        self.mailbox.when_empty = self._proceed

    # AgentCluster

    def living_nodes(self) -> Mapping[str, Mapping[str, float]]:
        with self._simulated():
            return {_node(host): {"CPU": float(PER_HOST)} for host in self._alive_hosts}

    def free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        with self._simulated():
            return {_node(host): {"CPU": float(self._free[host])} for host in self._alive_hosts}

    def launcher(self, spec: AgentSpec, *_: Any) -> SimulatedHosts:
        self._store = spec.store
        return self

    def streams(self, datasets: Sequence[Any], held: Mapping[str, float]) -> Nothing:
        return Nothing()

    def watch(self, tell: Callable[[Mapping[str, LeavingNode]], None]) -> Nothing:
        self._tell_of_nodes = tell
        return Nothing()

    # CallingLauncher

    def reserve(self, bundles: int, strategy: str) -> None:
        self._bundles = {bundle: bundle // PER_HOST for bundle in range(bundles)}
        for host in self._bundles.values():
            self._free[host] -= 1

    def move(self, bundles: Collection[int], strategy: str, avoid: frozenset[str]) -> None:
        free = (
            host
            for host in sorted(self._alive_hosts)
            if _node(host) not in avoid
            for _ in range(self._free[host])
        )
        for bundle, host in zip(bundles, [*free], strict=False):
            self._bundles[bundle] = host
            self._free[host] -= 1

    def move_back(self, bundles: Collection[int]) -> frozenset[int]:
        return frozenset()

    def free_unused(self) -> None:
        """Nothing is held twice."""

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        assert bundle is not None
        handle = AgentHandle(number=next(self._numbers), bundle=bundle)
        if self._bundles[bundle] not in self._alive_hosts:
            self.move([bundle], "PACK", avoid)
        host = self._bundles[bundle]
        self._agents[handle.number] = _Agent(handle, host)
        place = NodeAddress(node_id=_node(host), host=f"10.0.{host // 250}.{host % 250}")
        self.mailbox.put([Arrived(agent_handle=handle, place=place)])
        return handle

    def dismiss(self, agent_handle: AgentHandle) -> None:
        self._agents.pop(agent_handle.number, None)

    def try_links(self, agent_handles: Sequence[AgentHandle]) -> None:
        self.mailbox.put([LinksTried(failed=())])

    def outlook(self) -> None:
        return None

    def starting(self) -> Starting:
        return Starting()

    def call(
        self, call: AgentCall, assignments: Mapping[AgentHandle, RankAssignment | None]
    ) -> None:
        with self._simulated():
            hosts = set()
            for handle, assignment in assignments.items():
                agent = self._agents.get(handle.number)
                if agent is not None:
                    hosts.add(agent.host)
                    self.calls[type(call).__name__] += 1
                    self._carry_out(agent, call, assignment)
            self.messages[type(call).__name__] += len(hosts)

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing is held."""

    # What happens

    @property
    def is_training(self) -> bool:
        """Whether all ranks have joined."""
        return self.joined == self.workers

    def report(self, step: int) -> None:
        """Every rank reports."""
        self._tell_each(
            lambda rank: Reported(
                attempt=self.attempt, rank=rank, step=step, metrics={"loss": 1.0 / step}, at=1.0
            )
        )

    def save(self, step: int, number: int) -> None:
        """Every rank stages its part of a checkpoint, and its agent stores it."""
        self.acknowledged.clear()
        self._tell_each(
            lambda rank: PartStaged(attempt=self.attempt, rank=rank, checkpoint=number, waits=False)
        )
        attempt_id = self._order.attempt_id
        name = directory_name(number, attempt_id)
        directory = Path(self._store.location.address, "checkpoints", name)
        directory.mkdir(parents=True)

        def stored(rank: int) -> PartStored:
            (directory / f"rank-{rank}").write_bytes(_CONTENT)
            file = StoredFile(name=f"rank-{rank}", size=len(_CONTENT), sha256=_DIGEST, rank=rank)
            return PartStored(
                attempt=self.attempt,
                rank=rank,
                checkpoint=number,
                step=step,
                metrics={"loss": 1.0 / step},
                positions={},
                files=(file,),
            )

        self._tell_each(stored)

    def tick(self, window: int) -> None:
        """Every agent says how busy its worker process was, and that it makes no progress."""
        self._tell_each(
            lambda rank: Load(attempt=self.attempt, rank=rank, window=window, busy=rank % 10 / 10)
        )
        self._tell_each(
            lambda rank: WorkerStatus(
                attempt=self.attempt,
                rank=rank,
                stage=WorkerStage.TRAINING,
                quiet_s=30.0 * rank / self.workers,
                idle_s=0.0,
                stopped_s=0.0,
                cpu_s=1.0,
            )
        )

    def lose_worker(self, rank: int) -> None:
        """A worker process is killed."""
        self._ranks[rank].is_alive = False
        self.joined = 0
        self._put(Exited(attempt=self.attempt, rank=rank, how="killed by SIGKILL", killed=False))

    def lose_host(self, rank: int) -> None:
        """A rank's host is gone, with all its agents."""
        host = self._ranks[rank].host
        self._alive_hosts.remove(host)
        self.joined = 0
        for agent in list(self._agents.values()):
            if agent.host == host:
                agent.is_alive = False
                self.mailbox.put(
                    [
                        Gone(
                            agent_handle=agent.handle,
                            kind=FailureKind.NODE_LOST,
                            reason="its node is gone",
                        )
                    ]
                )

    def announce_end_of_host(self, rank: int) -> None:
        """A rank's host is about to be taken away."""
        host = self._ranks[rank].host
        self.joined = 0
        node = LeavingNode(address=f"10.0.{host // 250}.{host % 250}", deadline_ms=None)
        self._tell_of_nodes({_node(host): node})

    def stop_after_drain(self) -> None:
        """Rank 0 has stopped after its checkpoint."""
        self._put(Drained(attempt=self.attempt, rank=0))

    def finish(self) -> None:
        """Every rank is done."""
        self._is_over = True
        self._tell_each(lambda rank: Done(attempt=self.attempt, rank=rank))

    def _carry_out(self, agent: _Agent, call: AgentCall, assignment: RankAssignment | None) -> None:
        rank = agent.rank
        match call:
            case LaunchProcess(order=order):
                if assignment is not None:
                    agent.rank = rank = assignment.rank
                self._ranks[rank] = agent
                agent.is_alive = True
                self._order, self.attempt, self.joined = order, order.attempt, 0
                self._put(Started(attempt=order.attempt, rank=rank))
                self._put(
                    Offered(
                        attempt=order.attempt,
                        rank=rank,
                        offer=Offer(host=order.members[rank].host, port=20_000 + rank % PER_HOST),
                    )
                )
            case SendRoster(attempt=attempt):
                self.joined += 1
                self._put(Joined(attempt=attempt, rank=rank, device="CPU", node="node"))
            case Leave(attempt=attempt):
                self._exit(agent, attempt, killed=False)
            case Kill(attempt=attempt):
                if not self._is_over and agent.is_alive and rank != 0:
                    # Ranks notice that a connection is broken before they are killed.
                    self._put(Failed(attempt=attempt, failure=_broken(rank)))
                self._exit(agent, attempt, killed=True)
            case Acknowledge():
                self.acknowledged.add(rank)
            case StoreRest() | DrainAttempt():
                pass

    def _exit(self, agent: _Agent, attempt: int, *, killed: bool) -> None:
        if agent.is_alive:
            agent.is_alive = False
            how = "killed by SIGKILL" if killed else "exited with code 0"
            self._put(Exited(attempt=attempt, rank=agent.rank, how=how, killed=killed))

    def _tell_each(self, event_of: Callable[[int], Any]) -> None:
        for rank in range(self.workers):
            self._put(event_of(rank))

    def _put(self, event: Any) -> None:
        self.mailbox.put([event])

    def _proceed(self) -> None:
        """Go on with the story until something has happened, or until it waits for the driver."""
        while self.mailbox.empty():
            with self._simulated():
                part = next(self._story, None)
            if part is None:
                return
            self.begin(part)

    def begin(self, part: str | None) -> None:
        """Note which part of the story begins; None for none."""
        now = time.process_time() - self.own_s
        if self._part is not None:
            name, since = self._part
            self.seconds[name] = now - since
        self._part = None if part is None else (part, now)
        self.on_part(part or "")

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self.own_s += time.thread_time() - begun

    def fit(self, storage: Path, **options: Any) -> Result:
        """Train on these hosts."""

        def opened(*_: Any) -> contextlib.AbstractContextManager[SimulatedHosts]:
            return contextlib.nullcontext(self)

        with (
            mock.patch("polytrain.api.trainer.opened_cluster", opened),
            mock.patch("polytrain.run.assembly.Mailbox", return_value=self.mailbox),
        ):
            trainer = Trainer(
                Reference(),
                _train,
                scaling_config=ScalingConfig(num_workers=self.workers, cluster="ray"),
                run_config=RunConfig(
                    name="run",
                    storage_path=storage,
                    failure_config=FailureConfig(max_failures=10),
                    checkpoint_config=CheckpointConfig(written_by="every_rank"),
                    **{"progress": "none", **options},
                ),
            )
            self.begin("start")
            result = trainer.fit()
            self.begin(None)
        return result


def whole_story(hosts: SimulatedHosts) -> Story:
    """A run with a loss of each kind."""
    while not hosts.is_training:
        yield None
    yield "report"
    hosts.report(1)
    yield None
    yield "checkpoint"
    hosts.save(1, 0)
    while len(hosts.acknowledged) < hosts.workers:
        yield None
    yield "tick"
    hosts.tick(0)
    hosts.tick(1)
    yield None
    yield "worker lost"
    hosts.lose_worker(hosts.workers // 2)
    while not hosts.is_training:
        yield None
    yield "host lost"
    hosts.lose_host(hosts.workers // 2)
    while not hosts.is_training:
        yield None
    yield "drain"
    hosts.announce_end_of_host(0)
    yield None
    hosts.save(2, 1)
    while len(hosts.acknowledged) < hosts.workers:
        yield None
    hosts.stop_after_drain()
    while not hosts.is_training:
        yield None
    yield "end"
    hosts.finish()


def _train() -> None:
    """No worker process calls it."""


def _node(host: int) -> str:
    return f"node-{host:06d}"


def _broken(rank: int) -> Failure:
    message = f"ConnectionError: connection to 10.0.0.1:{20_000 + rank} was reset by its peer"
    return Failure(
        kind=FailureKind.CONNECTION_LOST,
        rank=rank,
        message=message,
        traceback="Traceback (most recent call last):\n"
        + '  File "train.py", line 1, in train\n    step()\n' * 10
        + message,
    )
