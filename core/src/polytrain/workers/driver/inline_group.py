"""Runs one worker in the process that called `fit()`, so that a debugger can attach."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pyarrow as pa

from polytrain.checkpoint.parts import clear_staged, stored_part
from polytrain.checkpoint.scratch import Scratch
from polytrain.checkpoint.starting_point import brought_near
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.listening import ports_of
from polytrain.config.run_spec import RunSpec
from polytrain.config.runtime_env import variables_of
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.opening import open_shards
from polytrain.data.shards.spec import DatasetSpec, Held, ShardSpec
from polytrain.errors import CheckpointError, Failure, FailureKind
from polytrain.events.attempt import AgentsPlaced, Event, Exited, Failed, Started
from polytrain.events.driver import DriverEvent
from polytrain.functions.pickling import THIS_MACHINE
from polytrain.policy.placement import NodeAddress, members
from polytrain.workers.agents.calls import AgentEvent, Call, ForWorker, Kill, message_of
from polytrain.workers.driver.group import Handler, Mailbox, arrived
from polytrain.workers.processes.channel import ConnectionClosedError, Message
from polytrain.workers.session.job import LaunchOrder, WorkerJob
from polytrain.workers.session.messages import to_event, to_part
from polytrain.workers.session.worker_process import run_worker
from polytrain_plugins import Demand, Member, changed_environment

logger = logging.getLogger(__name__)

_TURN = threading.RLock()
"""Held from an attempt's placement to its end: `report()` and the environment are the process's."""

_LOOK_S = 0.1
"""Seconds that a run waits for its turn before it looks at requests to stop."""

_PATIENCE_S = 10.0
"""Seconds that it waits before it says so."""


class InlineGroup:
    """A `WorkerGroup` of one worker, which runs in the caller's thread.

    Those in several threads train one after the other.
    The worker's messages are handled before it continues, and what they bring into the driver's
    mailbox, so a report takes effect at once.
    """

    def __init__(
        self,
        *,
        run: RunSpec,
        store: CheckpointStore,
        demand: Demand,
        datasets: tuple[RunDataset, ...],
        specs: tuple[DatasetSpec, ...],
        mailbox: Mailbox,
    ) -> None:
        self._job = WorkerJob.of(run, store)
        self._store = store
        self._scratch = Scratch.hold(secrets.token_hex(8))
        self._specs = specs
        self._shard_cache = [
            dataset.held_rows(spec, 1, 0)
            for dataset, spec in zip(datasets, specs, strict=True)
            if isinstance(spec, ShardSpec) and spec.held is not Held.NOTHING
        ]
        self._mailbox = mailbox
        self._environment = demand.environment
        self._variables = variables_of(run.run_config.worker_runtime_env)
        self._cpus = run.scaling_config.cpus_per_worker
        self._ports = ports_of(run.run_config.ports)
        self._tables: list[pa.Table] | None = None
        self._pending: list[Event] = []
        self._ordered: LaunchOrder | None = None
        self._inbox: deque[Message] = deque()
        self._killed = False
        self._has_turn = False
        self._waits_since: float | None = None
        self._has_warned = False

    @property
    def members(self) -> tuple[Member, ...]:
        here = NodeAddress(node_id="", host=THIS_MACHINE)
        return members([here], cpus=self._cpus, gpus=0, ports=self._ports)

    def place(self, *, avoid: Mapping[str, float], without: frozenset[int]) -> None:
        self._pending.append(AgentsPlaced(nodes=("",)))

    def launch(self, order: LaunchOrder) -> None:
        self._ordered = order
        self._inbox.clear()
        self._killed = False

    def call(self, call: Call, ranks: Collection[int] | None = None) -> None:
        # The others have no effect here: this thread can't dump its own stack while it trains, rank
        # 0 has no rest to store, and a lost process has no survivors.
        if isinstance(call, ForWorker):
            self._inbox.append(message_of(call))
        elif isinstance(call, Kill):
            self._killed = True

    def wait(self, handle: Handler, timeout: float | None) -> None:
        if self._handle_mail(handle):
            return
        if self._pending:
            if self._takes_turn(timeout):
                handle(self._pending.pop(0))
        elif self._ordered is not None:
            order, self._ordered = self._ordered, None

            def handle_all(event: AgentEvent | DriverEvent) -> None:
                handle(event)
                self._handle_mail(handle)

            try:
                self._run(order, handle_all)
            finally:
                self._end_turn()
        else:
            # There is a pause before the next attempt.
            self._take_mail(handle, timeout)

    def _handle_mail(self, handle: Handler) -> bool:
        """Pass on what is in the mailbox; return whether there was anything."""
        had_mail = False
        while not self._mailbox.empty():
            had_mail = True
            self._take_mail(handle, 0.0)
        return had_mail

    def _take_mail(self, handle: Handler, timeout: float | None) -> None:
        for event in arrived(self._mailbox, timeout):
            if isinstance(event, AgentEvent | DriverEvent):
                handle(event)

    def close(self) -> None:
        self._end_turn()
        self._scratch.release()

    def _takes_turn(self, timeout: float | None) -> bool:
        """Return whether no other thread's run trains, and none can begin until this one has."""
        if not self._has_turn:
            self._has_turn = _TURN.acquire(timeout=min(_LOOK_S, timeout or _LOOK_S))
        if self._has_turn:
            self._waits_since = None
            return True
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if now - self._waits_since >= _PATIENCE_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "This run waits for another thread's: of runs with num_workers=0 in a process, "
                "one trains at a time. If that one waits for this one, neither will end: stop this "
                "one, and give it ScalingConfig(num_workers=1)."
            )
        return False

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            _TURN.release()

    def _run(self, order: LaunchOrder, handle: Handler) -> None:
        scratch = self._scratch.path
        if self._tables is None:
            self._tables = [held.read() for held in self._shard_cache]
        tables = self._tables
        try:
            order = replace(order, start=brought_near(order.start, scratch))
        except (OSError, CheckpointError) as error:
            failure = Failure(
                kind=FailureKind.STORAGE, rank=0, message=f"{type(error).__name__}: {error}"
            )
            handle(Failed(attempt=order.attempt, failure=failure))
            self._exited(order, handle, how="never started")
            return
        handle(Started(attempt=order.attempt, rank=0))
        channel = _InlineChannel(
            take=lambda message: self._take(message, order, handle), inbox=self._inbox
        )
        unset = {k: v for k, v in self._environment.items() if k not in os.environ}
        with (
            changed_environment({**unset, **self._variables}),
            contextlib.suppress(ConnectionClosedError),
        ):
            run_worker(
                job=self._job,
                order=order,
                rank=0,
                shards=lambda: open_shards(
                    self._specs,
                    iter(tables),
                    order.start.positions,
                    skipped=order.start.skipped,
                    world_size=1,
                    rank=0,
                ),
                channel=channel,
                scratch=scratch,
                passes=(KeyboardInterrupt,),
            )
        self._exited(order, handle, how="returned")

    def _exited(self, order: LaunchOrder, handle: Handler, *, how: str) -> None:
        handle(Exited(attempt=order.attempt, rank=0, how=how, killed=self._killed))

    def _take(self, message: Message, order: LaunchOrder, handle: Handler) -> None:
        handle(to_event(message, attempt=order.attempt, rank=0))
        if message[0] == "staged":
            part = to_part(message, attempt_id=order.attempt_id, rank=0)
            handle(stored_part(self._store, part))
            clear_staged(part)
        if self._killed and message[0] != "raised":
            raise ConnectionClosedError("the attempt has been ended")


class _InlineChannel:
    """A channel within one thread."""

    def __init__(self, *, take: Callable[[Message], None], inbox: deque[Message]) -> None:
        self._take = take
        self._inbox = inbox

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._take(message)

    def receive(self) -> Message:
        if not self._inbox:
            raise ConnectionClosedError("the attempt has been ended")
        return self._inbox.popleft()

    def poll(self) -> Message | None:
        return self._inbox.popleft() if self._inbox else None
