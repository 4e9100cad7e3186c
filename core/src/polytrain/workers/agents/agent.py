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
from typing import TYPE_CHECKING, assert_never

from polytrain.checkpoint.parts import StagedPart, misplaced_part
from polytrain.checkpoint.scratch import Scratch
from polytrain.checkpoint.staging import COPIES
from polytrain.checkpoint.starting_point import brought_near
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    CopiesHeld,
    Exited,
    Failed,
    KeptRead,
    LeaveTimedOut,
    Stacks,
    Started,
    StateUnwritten,
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
from polytrain.workers.agents.kept_copies import KeptCopies, Room
from polytrain.workers.agents.node_checks import StorageCheck, versions_unlike
from polytrain.workers.agents.part_storer import AsEvent, PartStorer, if_undamaged, of_state
from polytrain.workers.agents.rank_data import RankData
from polytrain.workers.agents.sent_copies import Copy, Neighbour, Piece, SentCopies, Whole
from polytrain.workers.agents.worker_connection import WorkerConnection
from polytrain.workers.processes.channel import Message
from polytrain.workers.processes.loop_thread import in_daemon_thread
from polytrain.workers.processes.zygote_client import ZygoteClient
from polytrain.workers.session.job import JobMemory, LaunchOrder

if TYPE_CHECKING:
    from polytrain.workers.agents.shard_cache import ShardCache


_ENTRY = "polytrain.workers.session.worker_process"


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
        self._with_roster = -1
        """The attempt that has got its roster; -1 before the first."""

        self._to_drain: DrainAttempt | None = None
        self._data = RankData()
        self._last: WorkerConnection | None = None
        """The newest connection, whose kept states outlive it."""

        self._asked: WriteState | None = None
        """The request for a state that the worker process hasn't answered."""

        self._sent = SentCopies(emit)
        self._room = room
        self._kept_copies: KeptCopies | None = None
        """Copies of ranks on another host; None until one arrives."""

        self._launched = -1
        """The newest attempt that was launched."""

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
        return replace(
            self._place, unusable=self._place.unusable or unusable, other_versions=others
        )

    def meet(self, neighbour: Neighbour | None) -> None:
        """Send copies of the rank's state to another host from now on; None ends that."""
        self._sent.neighbour = neighbour

    async def keep(self, sent: Piece | Whole) -> None:
        """Keep what the agent of a rank on another host sends of a copy.

        Raises:
            OSError: there is no room for it.
            ValueError: it isn't of this attempt.
        """
        assert self._scratch is not None
        if self._kept_copies is None:
            self._kept_copies = KeptCopies(self._scratch.path, self._room, self._launched)
        await asyncio.to_thread(self._kept_copies.take, sent)

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
                    self._data.request(assignment.data)
                await self._launch(order, streams)
            case FetchShared(shared=shared):
                await self._data.fetch(shared)
            case SendRoster(attempt=attempt):
                self._send(call)
                self._with_roster = attempt
                if self._to_drain is not None:
                    self._send(self._to_drain)
            case DrainAttempt(attempt=attempt):
                # The worker process reads it after the roster.
                self._to_drain = call
                if self._with_roster == attempt:
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
                self._read_kept(attempt)
            case WriteState(attempt=attempt):
                self._ask_for_state(call)
            case StoreCopy(of_rank=rank):
                if rank is None:
                    self._store_copy(call)
                else:
                    self._store_kept_copy(call, rank)
            case SendCopies(attempt=attempt, number=number, common=common):
                worker = self._connection_of(attempt)
                self._sent.send_from(attempt, number, common, worker.copies if worker else {})
            case _:
                assert_never(call)

    def _read_kept(self, attempt: int) -> None:
        last = self._last_of(attempt)
        read = KeptRead(
            attempt=attempt,
            rank=self._rank,
            states=() if last is None or last.kept is None else last.kept.read(),
            is_alive=self._connection_of(attempt) is not None,
        )
        self.emit(read)

    def _ask_for_state(self, call: WriteState) -> None:
        worker, why = self._connection_of(call.attempt), "its process is gone"
        if worker is not None and worker.kept is not None:
            try:
                worker.kept.ask(call)
            except OSError as error:
                why = f"it can't be asked: {error}"
            else:
                self._asked = call
                loop = asyncio.get_running_loop()
                loop.call_later(call.limit_s, self._state_is_late, call)
                return
        self._emit_unwritten(call.attempt, why)

    def _state_is_late(self, call: WriteState) -> None:
        if self._asked is call:
            self._asked = None
            self._emit_unwritten(call.attempt, f"it took more than {call.limit_s:.1f} s")

    def not_written(self, checkpoint: int, why: str) -> None:
        """Report that a survivor can't write its state, unless it is reported to be late."""
        asked = self._asked
        if asked is not None and asked.checkpoint == checkpoint:
            self._asked = None
            self._emit_unwritten(asked.attempt, why)

    def _emit_unwritten(
        self, attempt: int, why: str, *, is_copy: bool = False, rank: int | None = None
    ) -> None:
        whose = self._rank if rank is None else rank
        self.emit(StateUnwritten(attempt=attempt, rank=whose, reason=why, is_copy=is_copy))

    def copied(self, copies: Mapping[int, Copy]) -> None:
        """Send a copy to another host, if it is this one's turn."""
        self._sent.made(copies)

    def take_state(self, state: Copy) -> None:
        """Store what a survivor has written, unless it comes too late."""
        asked, self._asked = self._asked, None
        if asked is not None and asked.checkpoint == state.part.checkpoint:
            self.take_part(state.part, of_state(state, is_copy=False))

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
        try:
            order = await self._brought_near(order)
        except Exception as error:  # any error of the storage ends the attempt
            self._never_started(order, FailureKind.STORAGE, f"{type(error).__name__}: {error}")
            return
        await self._delete_copies(before=order.attempt)
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
        self._sent.stop()
        # It may keep files that releasing the scratch directory deletes.
        self._parts.close()
        if self._scratch is not None:
            self._scratch.release()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._forget_kept()
        if self._gpu_meter is not None:
            self._gpu_meter.close()
        await self._data.release()
        return zygote

    @property
    def _rank(self) -> int:
        assert self._assignment is not None, "nothing is launched before it has a rank"
        return self._assignment.rank

    async def _brought_near(self, order: LaunchOrder) -> LaunchOrder:
        start, scratch = order.start, self._scratch
        if start.location is None or start.location.is_local or scratch is None:
            return order

        def bring() -> LaunchOrder:
            with scratch.one_at_a_time("restore"):
                return replace(order, start=brought_near(start, scratch.path))

        return await in_daemon_thread(bring)

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
        self._forget_kept()
        self._worker = self._last = worker
        extents = held.extents if held else ()
        what = pickle.dumps((order, extents, len(lines), self._spec.route))
        self.emit(Started(attempt=order.attempt, rank=self._rank))
        worker.child.begin(["start", what, self._rank, str(self._scratch.path)])

    async def _delete_copies(self, *, before: int) -> None:
        """Delete the copies of attempts before one: it needs the room."""
        assert self._scratch is not None
        await self._sent.launched(before, self._rank, self._scratch.path)
        self._launched = max(before, self._launched)
        if self._kept_copies is not None:
            await in_daemon_thread(self._kept_copies.launched, before, else_here=True)

    def _forget_kept(self) -> None:
        if self._last is not None and self._last.kept is not None:
            self._last.kept.close()
        self._last = self._asked = None

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
        if self._asked is not None and self._asked.attempt == worker.attempt:
            # Another survivor may have the time that is left.
            self.not_written(self._asked.checkpoint, f"its process has ended: {how}")
        self._take_copies(worker)
        ended_at = min(now, worker.child.ended_at or now)
        conclude = self._conclude(worker, how, killed, ended_at)
        self._concluding = asyncio.get_running_loop().create_task(conclude)

    async def _conclude(
        self, worker: WorkerConnection, how: str, killed: bool, ended_at: float
    ) -> None:
        await self._parts.finish()
        now = asyncio.get_running_loop().time()
        self.emit(
            Exited(
                attempt=worker.attempt,
                rank=self._rank,
                how=how,
                killed=killed,
                out_of_memory=not killed and worker.child.lacked_memory(how),
                output=worker.child.last_words,
                since_s=0.0 if killed else now - ended_at,
            )
        )

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

    def _take_copies(self, worker: WorkerConnection) -> None:
        """Store the newest copy of the state of a training that was cut off.

        Of several ranks, the driver chooses one that all have.
        """
        self._sent.stop()
        if not worker.copies or worker.has_finished:
            return
        if len(worker.order.members) > 1:
            numbers = tuple(sorted({*worker.copies, *self._sent.there}))
            held = CopiesHeld(attempt=worker.attempt, rank=self._rank, numbers=numbers)
            self.emit(held)
            return
        number = max(self._newest_part + 1, worker.order.first_checkpoint)
        self._take_copy(worker, max(worker.copies), checkpoint=number)

    def _store_copy(self, call: StoreCopy) -> None:
        last = self._last_of(call.attempt)
        if last is not None and call.number in last.copies:
            self._take_copy(last, call.number, checkpoint=call.checkpoint)
        elif last is not None and call.number in self._sent.there:
            self._store_as(self._sent.there[call.number], call.checkpoint)
        else:
            self._emit_unwritten(
                call.attempt, f"it has no copy of step {call.number}", is_copy=True
            )

    def _store_kept_copy(self, call: StoreCopy, rank: int) -> None:
        """Store the copy of a rank that is lost with its agent."""
        kept = self._kept_copies
        found = None if kept is None else kept.copy(call.attempt, rank, call.number)
        if found is None:
            why = f"{self._place.host} has no copy of step {call.number}"
            self._emit_unwritten(call.attempt, why, is_copy=True, rank=rank)
            return
        copy, hashes = found
        checked = if_undamaged(of_state(copy, is_copy=True), hashes, host=self._place.host)
        self._store_as(copy, call.checkpoint, checked)

    def _take_copy(self, worker: WorkerConnection, number: int, *, checkpoint: int) -> None:
        assert self._scratch is not None
        copy = worker.copies[number]
        misplaced = misplaced_part(copy.part, scratch=self._scratch.path / COPIES, near=None)
        if misplaced is not None:
            self.emit(misplaced)
            self._emit_unwritten(worker.attempt, misplaced.failure.message, is_copy=True)
            return
        self._store_as(copy, checkpoint)

    def _store_as(self, copy: Copy, checkpoint: int, as_event: AsEvent | None = None) -> None:
        part = replace(copy.part, checkpoint=checkpoint)
        self._parts.take(part, as_event or of_state(copy, is_copy=True))

    def _send(self, call: ForWorker) -> None:
        """Pass a call on to the worker process of its attempt, if that is there."""
        worker = self._connection_of(call.attempt)
        if worker is not None:
            worker.child.send(message_of(call))

    def _connection_of(self, attempt: int) -> WorkerConnection | None:
        worker = self._worker
        return worker if worker is not None and worker.attempt == attempt else None

    def _last_of(self, attempt: int) -> WorkerConnection | None:
        """Return an attempt's connection, also once its process has ended."""
        last = self._last
        return last if last is not None and last.attempt == attempt else None

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
