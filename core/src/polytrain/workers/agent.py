"""The agent of one rank: an object that owns what must survive a worker process.

It holds the rank's resources and data, has workers forked, reads what they hand over, stores
checkpoints, and pushes everything that happens to the controller. It imports neither Ray nor a
framework: it lives in an actor of Ray's (`ray_agent`), or in the driver (`local_recruiter`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from polytrain.checkpoint.parts import StagedPart, stored_part
from polytrain.checkpoint.scratch import Scratch
from polytrain.checkpoint.starting_point import brought_near
from polytrain.checkpoint.store import CheckpointStore
from polytrain.common.errors import Failure, FailureKind
from polytrain.common.events import Exited, Failed
from polytrain.common.placement import NodeAddress
from polytrain.common.processes import describe_exit, kill_session
from polytrain.monitoring.health_events import Overstayed, Stacks, Started
from polytrain.workers.group import Happening
from polytrain.workers.import_path import import_path
from polytrain.workers.job import LaunchOrder
from polytrain.workers.messages import (
    Message,
    drain_message,
    leave_message,
    roster_message,
    settled_message,
)
from polytrain.workers.process_connection import ProcessConnection
from polytrain.workers.processes.agent_side import Zygotes
from polytrain.workers.processes.client import ZygoteSpec, zygote_name
from polytrain_plugins import Offer

if TYPE_CHECKING:
    from polytrain.workers.ray_streams import StreamOrder
    from polytrain.workers.shard_cache import CacheRequest, ShardCache


_MARKER_S = 5.0
"""Seconds within which what the driver has written is seen on a file system that all mount."""

_SIGKILLED = describe_exit(signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """What every agent of a run is started with."""

    token: str
    """Names the run on every node; no other run has the same."""

    zygote: ZygoteSpec
    """Its name is completed with the agent's node."""

    environment: Mapping[str, str]
    """Variables that the backend wants worker processes to have."""

    directory: str
    """The driver's working directory."""

    prefix: str
    """The driver's `sys.prefix`."""

    store: CheckpointStore

    marker: str
    """A file that the driver has written into the run's storage."""

    hang_timeout_s: float | None
    """Seconds without progress that are told; None for none."""

    straggler_window_s: float | None
    """Seconds over which it is told how busy a worker process was; None for never."""

    leave_timeout_s: float
    """Seconds after which a worker process that was told to leave is killed."""


class Agent:
    """All its methods run on one event loop; storing runs on a thread of its own."""

    def __init__(self, spec: AgentSpec, place: NodeAddress, variables: Mapping[str, str]) -> None:
        """
        Args:
            spec: what all agents of the run have in common.
            place: where this one is.
            variables: environment variables that worker processes have there, before all others.
        """
        self._spec = spec
        self._place = place
        name = zygote_name(spec.zygote.name, place.node_id)
        is_same_environment = sys.prefix == spec.prefix
        if not is_same_environment:
            # The driver may have started one here, in its own environment.
            name += hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
        path = import_path(
            spec.zygote.path,
            here=sys.path,
            variable=os.environ.get("PYTHONPATH", ""),
            is_same_environment=is_same_environment,
        )
        self._zygotes = Zygotes(replace(spec.zygote, name=name, path=path), tell=self)
        self._environment = {
            **spec.environment,
            **os.environ,
            **variables,
        }
        self._events: asyncio.Queue[Happening] = asyncio.Queue()
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="polytrain-store")
        self._trainer: ProcessConnection | None = None
        self._storing: set[asyncio.Task[None]] = set()
        self._concluding: asyncio.Task[None] | None = None
        self._killed = -1
        self._scratch: Scratch | None = None
        self._staged: dict[int, Path] = {}
        self._job = b""
        self._seat: tuple[int, int] | None = None
        self._seated = asyncio.Condition()
        self._has_roster = -1
        self._to_drain = -1
        self._data: CacheRequest | None = None
        self._holding: asyncio.Task[ShardCache] | None = None

    async def place(self) -> NodeAddress:
        """Be ready for a rank, and say where this is."""
        # It may be long until it gets a rank: by then the zygote has imported everything.
        self._zygotes.connect()
        self._scratch = Scratch.hold(self._spec.token)
        return replace(self._place, unusable=await self._storage_problem())

    async def _storage_problem(self) -> str | None:
        """What is wrong with the run's storage as this node sees it, if anything is."""
        location = self._spec.store.location
        if not location.is_local:
            return None
        marker = Path(location.address, self._spec.marker)
        deadline = time.monotonic() + _MARKER_S
        # A network file system may show a new file late.
        while not marker.exists():
            if time.monotonic() > deadline:
                return (
                    f"the node {self._place.host} doesn't see the run's directory "
                    f"{location.address}, which the driver has made. Set RunConfig.storage_path to "
                    "a directory that all nodes mount, or to object storage such as s3://bucket"
                )
            await asyncio.sleep(0.1)
        return None

    async def prepare(self, seat: tuple[int, int], job: bytes, data: CacheRequest | None) -> None:
        """Take a rank of so many, and have its data read. `launch` waits for that."""
        async with self._seated:
            self._seat, self._job, self._data = seat, job, data
            self._begin_to_hold(before=self._holding)
            self._seated.notify_all()

    async def events(self) -> AsyncIterator[list[Happening]]:
        """Everything that happens, in order, at once; what is ready together comes together."""
        while True:
            batch = [await self._events.get()]
            while not self._events.empty():
                batch.append(self._events.get_nowait())
            yield batch

    async def launch(
        self, seat: tuple[int, int], order: LaunchOrder, streams: tuple[StreamOrder, ...]
    ) -> None:
        """Have a worker process forked for a new attempt, with its data and what it starts from."""
        # Ray promises no order of calls: this one may have come before that of `prepare`.
        async with self._seated:
            await self._seated.wait_for(lambda: self._seat == seat)
        try:
            held = await self._holding if self._holding is not None else None
        except Exception as error:  # whatever a data source raises ends the attempt
            # The next attempt reads anew: it may have been out of reach for a while.
            self._begin_to_hold(before=None)
            message = f"its data can't be read: {type(error).__name__}: {error}"
            self._never_started(order, FailureKind.STARTUP, message)
            return
        try:
            order = await self._brought_near(order)
        except Exception as error:  # whatever a storage raises ends the attempt
            self._never_started(order, FailureKind.STORAGE, f"{type(error).__name__}: {error}")
            return
        if order.attempt <= self._killed:
            self._emit_no_start(order)
            return
        try:
            self._launch(order, held, streams)
        except OSError as error:
            self._trainer = None
            self._never_started(order, FailureKind.STARTUP, f"can't fork a trainer: {error}")

    async def acknowledge(self, attempt: int, checkpoint: int) -> None:
        """Tell the worker process that this checkpoint isn't on its way any more."""
        # What was staged for older ones isn't what a new attempt would start from.
        for number in [number for number in self._staged if number < checkpoint]:
            shutil.rmtree(self._staged.pop(number), ignore_errors=True)
        self._send(attempt, settled_message(checkpoint))

    async def send_roster(self, attempt: int, offers: tuple[Offer, ...]) -> None:
        """Tell the worker process everybody's offer."""
        self._send(attempt, roster_message(offers))
        self._has_roster = attempt
        if self._to_drain == attempt:
            self._send(attempt, drain_message())

    async def drain(self, attempt: int) -> None:
        """Have the worker process make a checkpoint, and stop; but the roster comes first."""
        self._to_drain = attempt
        if self._has_roster == attempt:
            self._send(attempt, drain_message())

    async def leave(self, attempt: int) -> None:
        """Let the worker process leave the collective and end, and end it if it doesn't."""
        trainer = self._connection_of(attempt)
        if trainer is None:
            return
        trainer.send(leave_message())
        await asyncio.sleep(self._spec.leave_timeout_s)
        if self._trainer is trainer:
            overstayed = Overstayed(
                attempt=attempt,
                rank=self._rank,
                after_s=self._spec.leave_timeout_s,
                stacks=await trainer.stacks(pausing=True),
            )
            self._events.put_nowait(overstayed)
            await self.kill(attempt)

    async def dump_stacks(self, attempt: int, pausing: bool) -> None:
        """Tell what the worker process is doing."""
        trainer = self._connection_of(attempt)
        stacks = "its process is gone" if trainer is None else await trainer.stacks(pausing)
        self._events.put_nowait(Stacks(attempt=attempt, rank=self._rank, text=stacks))

    async def kill(self, attempt: int) -> None:
        """End the worker process at once."""
        self._killed = attempt
        self._zygotes.kill(attempt)

    def process_started(self, attempt: int, pid: int) -> None:
        trainer = self._connection_of(attempt)
        if trainer is not None:
            trainer.pid = pid

    def process_ended(self, attempt: int, how: str, *, killed: bool) -> None:
        trainer = self._connection_of(attempt)
        if trainer is not None:
            self._ended(trainer, how, killed=killed)

    def process_lost(self, attempt: int) -> None:
        """The kernel kills a zygote's workers with it; what they had started needs our help."""
        trainer = self._connection_of(attempt)
        if trainer is not None:
            if trainer.pid:
                kill_session(trainer.pid)
            self._ended(trainer, "its zygote died", killed=False)

    async def release(self) -> None:
        """Give back what would outlive this process."""
        await self._zygotes.close()
        if self._scratch is not None:
            self._scratch.release()

    async def end(self) -> None:
        """Give back everything: the process that this lives in stays."""
        await self.release()
        self._storer.shutdown(wait=False, cancel_futures=True)
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        if self._holding is not None:
            with contextlib.suppress(Exception):  # told when it was waited for
                (await self._holding).release()

    @property
    def _rank(self) -> int:
        assert self._seat is not None, "nothing is launched before it has a rank"
        return self._seat[0]

    def _begin_to_hold(self, before: asyncio.Task[ShardCache] | None) -> None:
        if self._data is not None:
            hold = self._hold(self._data, before)
            self._holding = asyncio.get_running_loop().create_task(hold)

    async def _hold(
        self, data: CacheRequest, before: asyncio.Task[ShardCache] | None
    ) -> ShardCache:
        held = None
        if before is not None:
            with contextlib.suppress(Exception):  # told when it was waited for
                held = await before
        return await asyncio.get_running_loop().run_in_executor(None, _hold, data, held)

    async def _brought_near(self, order: LaunchOrder) -> LaunchOrder:
        start, scratch = order.start, self._scratch
        if start.location is None or start.location.is_local or scratch is None:
            return order

        def bring() -> LaunchOrder:
            with scratch.one_at_a_time("restore"):
                return replace(order, start=brought_near(start, scratch.path))

        return await asyncio.get_running_loop().run_in_executor(None, bring)

    def _launch(
        self, order: LaunchOrder, held: ShardCache | None, streams: tuple[StreamOrder, ...]
    ) -> None:
        assert self._scratch is not None
        self._zygotes.connect()
        lines = _lines(order, streams, self._rank)
        trainer = ProcessConnection(
            order,
            self._rank,
            tell=self._events.put_nowait,
            stage=self._store_part,
            imported=self._preload,
            hang_timeout_s=self._spec.hang_timeout_s,
            straggler_window_s=self._spec.straggler_window_s,
        )
        self._trainer = trainer
        self._zygotes.fork(
            order.attempt,
            environment=self._environment,
            directory=self._spec.directory,
            descriptors=[
                *trainer.theirs,
                *(held.descriptors if held else ()),
                *(line.fileno() for line in lines),
            ],
        )
        for handed_over in lines:
            handed_over.close()
        extents = held.extents if held else ()
        what = pickle.dumps((order, extents, len(lines)))
        self._events.put_nowait(Started(attempt=order.attempt, rank=self._rank))
        trainer.begin(["start", self._job, what, self._rank, str(self._scratch.path)])

    def _ended(self, trainer: ProcessConnection, how: str, *, killed: bool) -> None:
        self._trainer = None
        now = asyncio.get_running_loop().time()
        trainer.close()
        trainer.ended_at = min(now, trainer.ended_at or now)
        conclude = self._conclude(trainer, how, killed)
        self._concluding = asyncio.get_running_loop().create_task(conclude)

    async def _conclude(self, trainer: ProcessConnection, how: str, killed: bool) -> None:
        await asyncio.gather(*self._storing)
        ended_at, now = trainer.ended_at, asyncio.get_running_loop().time()
        self._events.put_nowait(
            Exited(
                attempt=trainer.attempt,
                rank=self._rank,
                how=how,
                killed=killed,
                out_of_memory=not killed and how == _SIGKILLED and trainer.memory_ran_out,
                output=trainer.last_words,
                since_s=0.0 if killed or ended_at is None else now - ended_at,
            )
        )

    def _preload(self, message: Message) -> None:
        _, modules, variables = message
        self._zygotes.preload(modules, variables, self._environment, self._spec.directory)

    def _store_part(self, part: StagedPart) -> None:
        store = asyncio.get_running_loop().create_task(self._store(part))
        self._storing.add(store)
        store.add_done_callback(self._storing.discard)

    async def _store(self, part: StagedPart) -> None:
        loop, store = asyncio.get_running_loop(), self._spec.store
        event = await loop.run_in_executor(self._storer, stored_part, store, part)
        if store.location.is_local:
            shutil.rmtree(part.staged, ignore_errors=True)
        else:
            # The node's own copy, for an attempt that starts from it.
            self._staged[part.checkpoint] = part.staged
        self._events.put_nowait(event)

    def _send(self, attempt: int, message: Message) -> None:
        trainer = self._connection_of(attempt)
        if trainer is not None:
            trainer.send(message)

    def _connection_of(self, attempt: int) -> ProcessConnection | None:
        trainer = self._trainer
        return trainer if trainer is not None and trainer.attempt == attempt else None

    def _never_started(self, order: LaunchOrder, kind: FailureKind, message: str) -> None:
        failure = Failure(kind=kind, rank=self._rank, message=message)
        self._events.put_nowait(Failed(attempt=order.attempt, failure=failure))
        self._emit_no_start(order)

    def _emit_no_start(self, order: LaunchOrder) -> None:
        self._events.put_nowait(
            Exited(attempt=order.attempt, rank=self._rank, how="never started", killed=True)
        )


def _hold(data: CacheRequest, before: ShardCache | None) -> ShardCache:
    # Arrow takes a while to import; an agent of a run without data starts sooner.
    from polytrain.workers.shard_cache import hold

    return hold(data, before)


def _lines(order: LaunchOrder, streams: tuple[StreamOrder, ...], rank: int) -> list[socket.socket]:
    if not streams:
        return []
    from polytrain.workers.ray_streams import open_lines

    world_size = len(order.members)
    return open_lines(streams, attempt=order.attempt, world_size=world_size, rank=rank)
