"""The agent of one rank, which owns the resources that must survive a worker process.

It holds the rank's resources and data, requests worker processes, reads their messages, stores
checkpoints, and sends every event to the controller. It imports neither Ray nor a framework: it
runs in a Ray actor (`workers.ray.host`), or in the driver (`workers.driver.local_cluster`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

from polytrain.checkpoint.parts import StagedPart, misplaced_part
from polytrain.checkpoint.scratch import Scratch
from polytrain.checkpoint.starting_point import brought_near
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    Died,
    Exited,
    Failed,
    LeaveTimedOut,
    Stacks,
    Started,
    Unkillable,
)
from polytrain.linux.nvidia_gpus import GpuMeter
from polytrain.linux.processes import kill_session
from polytrain.policy.placement import NodeAddress
from polytrain.workers.agents.agent_spec import AgentSpec, node_zygote
from polytrain.workers.agents.calls import (
    Acknowledge,
    AgentCall,
    AgentEvent,
    DrainAttempt,
    DropCopy,
    FetchShared,
    ForWorker,
    Kill,
    LaunchProcess,
    Leave,
    RankAssignment,
    ReadKept,
    ReadStacks,
    SendCheckpoints,
    SendCopies,
    SendRoster,
    StoreCopy,
    StoreRest,
    StreamOrder,
    WriteState,
    message_of,
)
from polytrain.workers.agents.kept_copies import Room
from polytrain.workers.agents.left_states import LeftStates
from polytrain.workers.agents.node_checks import StorageCheck, versions_unlike
from polytrain.workers.agents.part_storer import AsEvent, PartStorer
from polytrain.workers.agents.rank_data import RankData
from polytrain.workers.agents.worker_connection import WorkerConnection
from polytrain.workers.processes.channel import Message
from polytrain.workers.processes.loop_thread import in_daemon_thread
from polytrain.workers.processes.zygote_client import ZygoteClient
from polytrain.workers.session.job import JobMemory, LaunchOrder

if TYPE_CHECKING:
    from polytrain.workers.agents.shard_cache import ShardCache


_ENTRY = "polytrain.workers.session.worker_process"

_STORED_WITHIN_S = 5.0
"""Seconds after the end of a process until it is reported, even if its parts of checkpoints aren't
stored yet. Usually they are soon, and the next attempt starts from them."""


class Agent:
    """The agent of one rank. All its methods run on one event loop."""

    def __init__(
        self,
        spec: AgentSpec,
        place: NodeAddress,
        variables: Mapping[str, str],
        job_memory: JobMemory,
        storage_check: StorageCheck | None,
        room: Room,
        *,
        emit: Callable[[AgentEvent], None],
    ) -> None:
        """
        Args:
            place: this agent's node.
            variables: environment variables of worker processes on this node; only
                `spec.zygote.variables` override them.
            job_memory: the memory of the run's job, which all agents of a host share.
            storage_check: the check of the node's storage; None in the driver's process, which uses
                the storage itself.
            room: the room for other ranks' copies, which all agents of a host share.
            emit: sends an event to the controller; called on the event loop.
        """
        self.emit = emit
        self._spec = spec
        self._place = place
        self._zygotes = ZygoteClient(
            node_zygote(spec.zygote, spec.prefix, place), _ENTRY, listener=self
        )
        self._environment = {
            **spec.zygote.environment,
            **os.environ,
            **variables,
            **spec.zygote.variables,
        }
        self._parts = PartStorer(spec.store, merges_files=spec.merges_files, emit=emit)
        self._worker: WorkerConnection | None = None
        self._gpu_meter: GpuMeter | None = None
        self._concluding: asyncio.Task[None] | None = None
        self._newest_killed = -1
        self._loading = -1
        """The attempt whose rows and starting checkpoint are being loaded; -1 if none is."""

        self._scratch: Scratch | None = None
        self._job_memory = job_memory
        self._storage_check = storage_check
        self._assignment: RankAssignment | None = None
        self._with_roster: set[int] = set()
        """Attempts that have got their roster."""

        self._to_drain: dict[int, DrainAttempt] = {}
        """Attempt → the request to stop it."""

        self._data = RankData()
        self.left = LeftStates(
            self._parts,
            room,
            host=place.host,
            emit=emit,
            take_part=self.take_part,
            kill=self._kill,
        )
        """What the training leaves if it is cut off."""

        self._newest_part = 0
        """The highest number of a checkpoint whose part was staged here."""

    async def place(self) -> NodeAddress:
        """Return this agent's node once it is ready for a rank."""
        # Connect now: until the agent gets a rank, the zygote can import modules.
        connecting, check = self._zygotes.connect(), self._storage_check
        unusable: str | None = None
        others: tuple[str, ...] = ()
        if check is None:
            await connecting
        else:
            versions = asyncio.to_thread(versions_unlike, self._spec.versions)
            _, unusable, others = await asyncio.gather(connecting, check.problem(), versions)
        self._scratch = Scratch.hold(self._spec.token)
        self.left.scratch = self._scratch.path
        return replace(
            self._place, unusable=self._place.unusable or unusable, other_versions=others
        )

    async def carry_out(self, call: AgentCall, assignment: RankAssignment | None = None) -> None:
        """Carry out a call. Calls may overlap and arrive in any order, because Ray reorders them.

        A call for another attempt than the current one has no effect.

        Args:
            assignment: the agent's rank if `LaunchProcess` gives it one; None if it keeps its own.
        """
        match call:
            case LaunchProcess(order=order, streams=streams):
                if assignment is not None:
                    self._assignment = assignment
                    self.left.rank = assignment.rank
                    self._data.request(assignment.data)
                await self._launch(order, streams)
            case FetchShared(shared=shared):
                await self._data.fetch(shared)
            case SendRoster(attempt=attempt):
                self._send(call)
                self._with_roster.add(attempt)
                if attempt in self._to_drain:
                    self._send(self._to_drain[attempt])
            case DrainAttempt(attempt=attempt, ends_run=ends_run):
                if ends_run:
                    self._parts.hurry()
                # The worker process reads it after the roster.
                self._to_drain[attempt] = call
                if attempt in self._with_roster:
                    self._send(call)
            case Leave():
                await self._leave(call)
            case Kill(attempt=attempt):
                self._kill(attempt)
            case ReadStacks(attempt=attempt, pausing=pausing):
                stacks = Stacks(
                    attempt=attempt, rank=self._rank, text=await self._stacks(attempt, pausing)
                )
                self.emit(stacks)
            case StoreRest(attempt=attempt, checkpoint=checkpoint, stored_already=stored_already):
                self._parts.store_rest(attempt, checkpoint, stored_already)
            case Acknowledge(checkpoint=checkpoint):
                self._parts.forget_copies(before=checkpoint)
                self._send(call)
            case SendCheckpoints() | DropCopy():
                self._send(call)
            case ReadKept(attempt=attempt):
                self.left.read_kept(attempt, is_alive=self._connection_of(attempt) is not None)
            case WriteState(attempt=attempt):
                self.left.ask(call, self._connection_of(attempt))
            case StoreCopy():
                self.left.store_copy(call)
            case SendCopies(attempt=attempt):
                self.left.send_copies(call, self._connection_of(attempt))
            case _:
                assert_never(call)

    async def _launch(self, order: LaunchOrder, streams: tuple[StreamOrder, ...]) -> None:
        if order.attempt <= self._newest_killed:
            self._emit_no_start(order.attempt)
            return
        self._loading = order.attempt
        try:
            held = await self._data.get()
        except Exception as error:  # any error of a data source ends the attempt
            message = f"its data can't be read: {type(error).__name__}: {error}"
            self._never_started(order, FailureKind.STARTUP, message)
            return
        assert self._scratch is not None
        try:
            self._scratch.hold_again()
            order = await _brought_near(order, self._scratch)
        except Exception as error:  # any error of the storage ends the attempt
            self._never_started(order, FailureKind.STORAGE, f"{type(error).__name__}: {error}")
            return
        await self.left.launched(order.attempt)
        try:
            await self._zygotes.connect()
        except OSError as error:
            message = f"can't reach the zygote that forks the worker process: {error}"
            self._never_started(order, FailureKind.STARTUP, message)
            return
        if self._loading != order.attempt:
            # It was killed meanwhile, and its end was reported.
            return
        self._loading = -1
        try:
            self._fork(order, held, streams)
        except OSError as error:
            self._never_started(
                order, FailureKind.STARTUP, f"can't fork the worker process: {error}"
            )

    async def _leave(self, call: Leave) -> None:
        """Request the worker process's end, and kill it after a timeout."""
        worker = self._connection_of(call.attempt)
        if worker is None:
            return
        self._send(call)
        await asyncio.sleep(self._spec.leave_timeout_s)
        if self._worker is worker:
            timed_out = LeaveTimedOut(
                attempt=call.attempt,
                rank=self._rank,
                after_s=self._spec.leave_timeout_s,
                stacks=await worker.stacks(pausing=True),
            )
            self.emit(timed_out)
            self._kill(call.attempt)

    async def _stacks(self, attempt: int, pausing: bool) -> str:
        worker = self._connection_of(attempt)
        if worker is not None:
            return await worker.stacks(pausing)
        if self._loading == attempt:
            return "it has no process yet: its agent loads its data and its starting checkpoint"
        return "its process is gone"

    def _kill(self, attempt: int) -> None:
        self._newest_killed = attempt
        self._zygotes.kill(attempt)
        worker = self._connection_of(attempt)
        if worker is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(self._spec.kill_timeout_s, self._give_up, worker)
        elif self._loading == attempt:
            # Loading can't be interrupted: report the end without waiting for it.
            self._loading = -1
            self._emit_no_start(attempt)

    def process_started(self, attempt: int, pid: int) -> None:
        worker = self._connection_of(attempt)
        if worker is not None:
            worker.child.pid = pid

    def process_ended(self, attempt: int, how: str, *, killed: bool) -> None:
        worker = self._connection_of(attempt)
        if worker is not None:
            self._ended(worker, how, killed=killed)

    def process_lost(self, attempt: int, why: str) -> None:
        """Kill the session: the kernel has killed only the zygote's direct children with it."""
        worker = self._connection_of(attempt)
        if worker is not None:
            if worker.child.pid:
                kill_session(worker.child.pid)
            self._ended(worker, f"its zygote died{why and ': '}{why}".strip(), killed=False)

    async def end(self) -> subprocess.Popen[bytes] | None:
        """Release everything; this agent's process lives on.

        Returns:
            The node's zygote if this agent started it. It lives while other agents use it.
        """
        zygote = self._zygotes.close()
        # It may keep files that releasing the scratch directory deletes.
        self._parts.close()
        if self._scratch is not None:
            self._scratch.release()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self.left.close()
        if self._gpu_meter is not None:
            self._gpu_meter.close()
        await self._data.release()
        return zygote

    @property
    def _rank(self) -> int:
        assert self._assignment is not None, "nothing is launched before it has a rank"
        return self._assignment.rank

    def _fork(
        self, order: LaunchOrder, held: ShardCache | None, streams: tuple[StreamOrder, ...]
    ) -> None:
        assert self._scratch is not None
        gpus = order.members[self._rank].gpus
        if gpus and self._gpu_meter is None:
            self._gpu_meter = GpuMeter(gpus, self._environment)
        worker = WorkerConnection(order, self._rank, self._spec, self._gpu_meter, agent=self)
        lines: list[socket.socket] = []
        try:
            for stream in streams:
                line = stream.open_line(world_size=len(order.members), rank=self._rank)
                lines.append(line)
            self._zygotes.fork(
                order.attempt,
                environment=self._environment,
                directory=self._spec.directory,
                argv=self._spec.argv,
                descriptors=[
                    *worker.child.descriptors,
                    self._job_memory.descriptor,
                    *(held.descriptors if held else ()),
                    *(line.fileno() for line in lines),
                ],
            )
        except BaseException:
            worker.discard()
            raise
        finally:
            for handed_over in lines:
                handed_over.close()
        self.left.begun(worker)
        self._worker = worker
        extents = held.extents if held else ()
        what = pickle.dumps((order, extents, len(lines), self._spec.route))
        self.emit(Started(attempt=order.attempt, rank=self._rank))
        worker.child.begin(["start", what, self._rank, str(self._scratch.path)])

    def _give_up(self, worker: WorkerConnection) -> None:
        """Stop waiting for a killed process, which won't run its code again."""
        if self._worker is not worker:
            return
        if worker.child.pid:
            # The zygote, which should kill it, may be hanging.
            kill_session(worker.child.pid)
        after_s = self._spec.kill_timeout_s
        unkillable = Unkillable(
            attempt=worker.attempt, rank=self._rank, pid=worker.child.pid, after_s=after_s
        )
        self.emit(unkillable)
        self._ended(worker, f"still there {after_s:g} s after SIGKILL", killed=True)

    def _ended(self, worker: WorkerConnection, how: str, *, killed: bool) -> None:
        self._worker = None
        now = asyncio.get_running_loop().time()
        worker.close()
        unused = max(self._newest_part + 1, worker.order.first_checkpoint)
        self.left.ended(worker, how, unused_number=unused)
        ended_at = min(now, worker.child.ended_at or now)
        conclude = self._conclude(worker, how, killed, ended_at)
        self._concluding = asyncio.get_running_loop().create_task(conclude)

    async def _conclude(
        self, worker: WorkerConnection, how: str, killed: bool, ended_at: float
    ) -> None:
        def end() -> dict[str, Any]:
            now = asyncio.get_running_loop().time()
            return {
                "attempt": worker.attempt,
                "rank": self._rank,
                "how": how if killed else worker.child.explained(how),
                "out_of_memory": not killed and worker.child.lacked_memory(how),
                "output": worker.child.last_words,
                "since_s": 0.0 if killed else now - ended_at,
            }

        finishing = asyncio.ensure_future(self._parts.finish())
        await asyncio.wait([finishing], timeout=_STORED_WITHIN_S)
        if not finishing.done() and not killed:
            self.emit(Died(**end()))
        await finishing
        if self._scratch is not None:
            self._parts.clear(self._scratch.path, worker.order.attempt_id, self._rank)
        self.emit(Exited(**end(), killed=killed))

    def preload(self, message: Message) -> None:
        """Have the zygote preload what a worker process says that it has imported."""
        _, modules, variables = message
        self._zygotes.preload(modules, variables, self._environment, self._spec.directory)

    def take_part(self, part: StagedPart, as_event: AsEvent | None = None) -> None:
        """Store a part of a checkpoint that a worker process has staged."""
        assert self._scratch is not None
        self._newest_part = max(self._newest_part, part.checkpoint)
        near = self._spec.store.near_staging
        misplaced = misplaced_part(part, scratch=self._scratch.path, near=near)
        if misplaced is None:
            self._parts.take(part, as_event)
        else:
            self.emit(misplaced)

    def _send(self, call: ForWorker) -> None:
        """Pass a call on to the worker process of its attempt, if that is there."""
        worker = self._connection_of(call.attempt)
        if worker is not None:
            worker.child.send(message_of(call))

    def _connection_of(self, attempt: int) -> WorkerConnection | None:
        worker = self._worker
        return worker if worker is not None and worker.attempt == attempt else None

    def _never_started(self, order: LaunchOrder, kind: FailureKind, message: str) -> None:
        if order.attempt <= self._newest_killed:
            # Its end was reported when it was killed.
            return
        self._loading = -1
        failure = Failure(kind=kind, rank=self._rank, message=message)
        self.emit(Failed(attempt=order.attempt, failure=failure))
        self._emit_no_start(order.attempt)

    def _emit_no_start(self, attempt: int) -> None:
        self.emit(Exited(attempt=attempt, rank=self._rank, how="never started", killed=True))


async def _brought_near(order: LaunchOrder, scratch: Scratch) -> LaunchOrder:
    start = order.start
    if start.location is None or start.location.is_local:
        return order

    def bring() -> LaunchOrder:
        with scratch.one_at_a_time("restore"):
            return replace(order, start=brought_near(start, scratch.path))

    return await in_daemon_thread(bring)
