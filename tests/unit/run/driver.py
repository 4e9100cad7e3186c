"""The driver of a run in a test's hands: a group without processes, and its clock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, assert_never

import pytest
from tests.unit.checkpoint.checkpoints import store_part

from polytrain.backends.reference import Reference
from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import PartStaged, PartStored, StateWritten
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.configs import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.config.run_spec import RunSpec
from polytrain.errors import RunOwnedError
from polytrain.events.attempt import (
    AgentsPlaced,
    Done,
    Exited,
    Joined,
    KeptRead,
    Offered,
    Reported,
    Stacks,
    Started,
)
from polytrain.events.driver import (
    DriverEvent,
)
from polytrain.linux.kept_states import KeptState
from polytrain.output.observers import Observers
from polytrain.output.worker_output import WorkerOutput
from polytrain.policy.divergence import DivergenceRule
from polytrain.policy.placement import NodeAddress, members
from polytrain.policy.stop_rule import StopRule
from polytrain.record.entries import Opened
from polytrain.record.journal import Journal
from polytrain.run.assembly import connected
from polytrain.run.attached_work import AttachedWork
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.controller import Controller
from polytrain.run.interrupts import Interrupts
from polytrain.run.requests import StopRequests
from polytrain.run.run import Run
from polytrain.run.states import Conclude
from polytrain.storage.location import Location
from polytrain.workers.agents.calls import (
    Acknowledge,
    AgentEvent,
    Call,
    DrainAttempt,
    DropCopy,
    Kill,
    Leave,
    ReadKept,
    ReadStacks,
    SendCheckpoints,
    SendRoster,
    StoreCopy,
    StoreRest,
    WriteState,
)
from polytrain.workers.driver.group import Handler, Mailbox, arrived
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import CheckpointKind, Demand, Member, Offer

BEGAN = 100.0
"""When a run begins, in seconds on its clock."""

Life = Callable[[LaunchOrder], Sequence[AgentEvent]]
"""What the ranks of an attempt say, from joining to being done."""


@dataclass
class FakeGroup:
    """A `WorkerGroup` whose worker processes are what a test says of them."""

    world_size: int
    life: Life
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    """What the controller has asked for, in order; the launch of each attempt included."""

    now: float = BEGAN
    """Seconds on the clock of the run."""

    pending: deque[AgentEvent] = field(default_factory=deque)
    alive: set[int] = field(default_factory=set)
    order: LaunchOrder | None = None
    mailbox: Mailbox = field(default_factory=Mailbox)
    is_inline: bool = True
    """Whether what an event brings into the mailbox is handled before the next event."""

    rescue: Callable[[WriteState], StateWritten] = field(init=False)
    """What the survivor that is asked first writes."""

    store_copies: Callable[[StoreCopy], Sequence[AgentEvent]] = field(init=False)
    """What the agents say that are asked for copies."""

    @property
    def members(self) -> tuple[Member, ...]:
        here = NodeAddress(node_id="node", host="127.0.0.1")
        return members([here] * self.world_size, cpus=1, gpus=0)

    def place(self, *, avoid: frozenset[str], without: frozenset[int]) -> None:
        self.calls.append(("place", avoid, without))
        self.pending.append(AgentsPlaced(nodes=("node",) * self.world_size))

    def launch(self, order: LaunchOrder) -> None:
        self.calls.append(("launch", order.attempt, order.start.step))
        self.order = order
        self.alive = set(range(self.world_size))
        self.pending += [Started(attempt=order.attempt, rank=rank) for rank in self.alive]
        self.pending += [
            Offered(attempt=order.attempt, rank=rank, offer=Offer()) for rank in self.alive
        ]

    def call(self, call: Call, ranks: Collection[int] | None = None) -> None:
        match call:
            case SendRoster(attempt=attempt):
                self.meet(attempt)
            case DrainAttempt(attempt=attempt):
                self.drain(attempt)
            case Leave(attempt=attempt):
                self._end(attempt, killed=False)
            case Kill(attempt=attempt):
                self.calls.append(("kill", attempt))
                self._end(attempt, killed=True)
            case ReadStacks(attempt=attempt, pausing=pausing):
                self.calls.append(("read_stacks", attempt, pausing))
                self.pending += [
                    Stacks(attempt=attempt, rank=rank, text="at rest") for rank in self.alive
                ]
            case ReadKept(attempt=attempt):
                states = (KeptState(point=1, is_forecast=False, content=b""),)
                self.pending += [
                    KeptRead(attempt=attempt, rank=rank, states=states, is_alive=rank in self.alive)
                    for rank in range(self.world_size)
                ]
            case WriteState():
                self.pending.append(self.rescue(call))
            case StoreCopy():
                self.calls.append(("store_copy", call.checkpoint, call.number))
                self.pending += self.store_copies(call)
            case DropCopy(number=number, is_last=is_last):
                self.calls.append(("drop_copy", number, is_last, sorted(ranks or ())))
            case StoreRest(checkpoint=checkpoint, stored_already=stored_already):
                names = None if stored_already is None else sorted(stored_already)
                self.calls.append(("store_rest", *(ranks or ()), checkpoint, names))
            case Acknowledge(checkpoint=checkpoint):
                self.calls.append(("acknowledge", checkpoint, sorted(ranks or ())))
            case SendCheckpoints(number=number, checkpoints=checkpoints):
                self.calls.append(("send_checkpoints", *(ranks or ()), number, [*checkpoints]))
            case _:
                assert_never(call)

    def meet(self, attempt: int) -> None:
        """The ranks have each other's offers, and live."""
        assert self.order is not None
        self.pending += [Joined(attempt=attempt, rank=rank) for rank in self.alive]
        self.pending += self.life(self.order)

    def drain(self, attempt: int) -> None:
        """The ranks are to stop."""
        self.calls.append(("drain", attempt))

    def wait(self, handle: Handler, timeout: float | None) -> None:
        if not self.pending and self.mailbox.empty():
            assert timeout is not None, "the run waits for ever"
            self.now += timeout
        self._handle_mail(handle)
        # As a group of real processes does: all that is known by now.
        while self.pending:
            handle(self.pending.popleft())
            if self.is_inline:
                self._handle_mail(handle)
        self._handle_mail(handle)

    def _handle_mail(self, handle: Handler) -> None:
        while not self.mailbox.empty():
            for event in arrived(self.mailbox, 0.0):
                assert isinstance(event, AgentEvent | DriverEvent)
                handle(event)

    def close(self) -> None:
        """It holds nothing."""

    def _end(self, attempt: int, *, killed: bool) -> None:
        how = "killed by SIGKILL" if killed else "exited with code 0"
        self.pending += [
            Exited(attempt=attempt, rank=rank, how=how, killed=killed) for rank in self.alive
        ]
        self.alive = set()

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls of this kind."""
        return [tuple(call[1:]) for call in self.calls if call[0] == kind]


class FakeLease:
    """A lease that a test can lose."""

    token = 1
    lost: RunOwnedError | None = None
    when_lost: Callable[[], None]

    def notify(self, when_lost: Callable[[], None]) -> None:
        self.when_lost = when_lost

    def check(self) -> None:
        if self.lost is not None:
            self.when_lost()
            raise self.lost


@dataclass
class Driver:
    """A controller with everything that it needs, in a directory of its own."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    life: Life
    world_size: int = 2
    max_failures: int = 0
    on_divergence: Literal["rollback", "fail"] | None = None
    max_rollbacks: int = 0
    merges_files: bool = True
    kind: CheckpointKind = CheckpointKind.ONE_RANK
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    group: FakeGroup = field(init=False)
    manager: CheckpointManager = field(init=False)
    controller: Controller = field(init=False)
    stop_rule: StopRule = field(default_factory=StopRule)
    divergence_rule: DivergenceRule | None = None
    stop_requests: StopRequests = field(default_factory=StopRequests)
    lease: FakeLease = field(default_factory=FakeLease)
    observers: Observers = field(default_factory=Observers)
    released: threading.Event = field(default_factory=threading.Event)
    """Set when training has ended and the run waits for validations alone."""

    def attached(self, manager: CheckpointManager, journal: Journal) -> AttachedWork | None:
        """What works on checkpoints beside training."""
        return None

    def conclude(self) -> Conclude:
        """Run to the end."""
        self.group = group = FakeGroup(self.world_size, self.life)
        location = Location.of(self.path, retry_s=0)
        self.manager = CheckpointManager(
            store=CheckpointStore(location=location),
            config=self.checkpoint_config,
            backend="reference",
            kind=self.kind,
            merges_files=self.merges_files,
            versions={},
            world_size=self.world_size,
            token=1,
        )
        for clock in ("time.monotonic", "time.time"):
            self.monkeypatch.setattr(clock, lambda: group.now)
        with (
            Journal(location.open(), token=1) as journal,
            WorkerOutput(self.path / "logs", retry_s=0) as output,
            BackgroundTasks(mailbox=group.mailbox, at_once=True) as background_tasks,
        ):
            journal.write(Opened(anew=True, identity={}, world_size=self.world_size))
            self.controller = connected(
                self._run(location),
                journal,
                group=group,
                mailbox=group.mailbox,
                output=output,
                observers=self.observers,
                background_tasks=background_tasks,
                attached=self.attached(self.manager, journal),
                release_workers=self.released.set,
                interrupts=Interrupts(),
            )
            self.controller.stop_rule = self.stop_rule
            self.controller.divergence_rule = self.divergence_rule
            return self.controller.conclude()

    def _run(self, location: Location) -> Run:
        failures = replace(
            self.failure_config,
            max_failures=self.max_failures,
            on_divergence=self.on_divergence,
            max_rollbacks=self.max_rollbacks,
        )
        lease: Any = self.lease
        return Run(
            spec=RunSpec(
                backend=Reference(),
                scaling_config=ScalingConfig(num_workers=self.world_size),
                run_config=RunConfig(
                    failure_config=failures, checkpoint_config=self.checkpoint_config
                ),
            ),
            datasets=(),
            demand=Demand(),
            cluster=None,
            choice=None,
            location=location,
            identity={},
            lease=lease,
            past=None,
            manager=self.manager,
            start=StartingPoint(),
            stop_requests=self.stop_requests,
        )

    def staged(self, rank: int, number: int, *, waits: bool = False) -> PartStaged:
        """A rank has staged its part."""
        return PartStaged(attempt=self._attempt, rank=rank, checkpoint=number, waits=waits)

    def stored(
        self,
        rank: int,
        number: int,
        *,
        step: int | None = None,
        validation: Mapping[str, Any] | None = None,
        **files: str,
    ) -> PartStored:
        """A rank's part with these files is in the storage."""
        attempt_id = AttemptId(token=1, attempt=self._attempt)
        return PartStored(
            attempt=self._attempt,
            rank=rank,
            checkpoint=number,
            step=number + 1 if step is None else step,
            metrics={},
            positions={},
            validation=validation,
            files=store_part(self.manager.store, number, rank, attempt_id=attempt_id, **files),
        )

    def reported(self, rank: int, step: int) -> Reported:
        return Reported(attempt=self._attempt, rank=rank, step=step, metrics={"loss": 1.0 / step})

    def all_done(self) -> list[Done]:
        return [Done(attempt=self._attempt, rank=rank) for rank in range(self.world_size)]

    @property
    def _attempt(self) -> int:
        assert self.group.order is not None
        return self.group.order.attempt

    @property
    def committed(self) -> list[list[str]]:
        """The names of the files of each checkpoint that a restart could begin with."""
        found = self.manager.store.find(since_token=0).manifests
        return [sorted(file.name for file in manifest.files) for manifest in found]
