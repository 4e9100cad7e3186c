"""The states of the training that a rank has left: its process's own, and copies of it.

A survivor's process writes its state when it is asked. On its node lie copies of this rank, and of
ranks on another host. After a loss the agent stores what the driver chooses of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from polytrain.checkpoint.parts import StagedPart, misplaced_part
from polytrain.checkpoint.staging import COPIES
from polytrain.events.attempt import CopiesHeld, KeptRead, StateUnwritten
from polytrain.workers.agents.calls import AgentEvent, SendCopies, StoreCopy, WriteState
from polytrain.workers.agents.kept_copies import KeptCopies, Room
from polytrain.workers.agents.part_storer import AsEvent, PartStorer, if_undamaged, of_state
from polytrain.workers.agents.sent_copies import Copy, Neighbour, Piece, SentCopies, Whole
from polytrain.workers.agents.worker_connection import WorkerConnection
from polytrain.workers.processes.loop_thread import in_daemon_thread


class LeftStates:
    """The states of one agent's rank. All methods run on the agent's event loop."""

    def __init__(
        self,
        parts: PartStorer,
        room: Room,
        *,
        host: str,
        emit: Callable[[AgentEvent], None],
        take_part: Callable[[StagedPart, AsEvent], None],
        kill: Callable[[int], None],
    ) -> None:
        """
        Args:
            parts: stores copies.
            room: the room for other ranks' copies, which all agents of a host share.
            host: the node's address.
            emit: sends an event to the controller.
            take_part: stores a state that a survivor has staged as a checkpoint's part.
            kill: kills the process of an attempt.
        """
        self._parts = parts
        self._room = room
        self._host = host
        self._emit = emit
        self._take_part = take_part
        self._kill = kill
        self.scratch = Path()
        """The run's directory on the node, once the agent holds it."""

        self.rank = -1
        """The agent's rank, once it has one."""

        self._launched = -1
        """The newest attempt that was launched."""

        self._last: WorkerConnection | None = None
        """The newest connection, whose kept states outlive it."""

        self._asked: WriteState | None = None
        """The request for a state that the worker process hasn't answered."""

        self._sent = SentCopies(emit)
        self._kept_copies: KeptCopies | None = None
        """Copies of ranks on another host; None until one arrives."""

    def meet(self, neighbour: Neighbour | None) -> None:
        """Send copies of the rank's state to another host from now on; None ends that."""
        self._sent.neighbour = neighbour

    async def keep(self, sent: Piece | Whole) -> None:
        """Keep what the agent of a rank on another host sends of a copy.

        Raises:
            OSError: there is no room for it.
            ValueError: it isn't of this attempt.
        """
        if self._kept_copies is None:
            self._kept_copies = KeptCopies(self.scratch, self._room, self._launched)
        await asyncio.to_thread(self._kept_copies.take, sent)

    async def launched(self, attempt: int) -> None:
        """Delete the copies of attempts before one that starts: it needs the room."""
        await self._sent.launched(attempt, self.rank, self.scratch)
        self._launched = max(attempt, self._launched)
        if self._kept_copies is not None:
            await in_daemon_thread(self._kept_copies.launched, attempt, else_here=True)

    def begun(self, worker: WorkerConnection) -> None:
        """Note that an attempt's process was forked: the states that the last one kept are void."""
        self._forget_kept()
        self._last = worker

    def ended(self, worker: WorkerConnection, how: str, *, unused_number: int) -> None:
        """Note that a process has ended, and store its newest copy if training was cut off.

        Of several ranks, the driver chooses a copy that all have.

        Args:
            how: how it has ended.
            unused_number: a number for the checkpoint, which no other has.
        """
        if self._asked is not None and self._asked.attempt == worker.attempt:
            # Another survivor may have the time that is left.
            self.not_written(self._asked.checkpoint, f"its process has ended: {how}")
        self._sent.stop()
        if not worker.copies or worker.has_finished:
            return
        if len(worker.order.members) > 1:
            numbers = tuple(sorted({*worker.copies, *self._sent.there}))
            held = CopiesHeld(attempt=worker.attempt, rank=self.rank, numbers=numbers)
            self._emit(held)
        else:
            self._take_copy(worker, max(worker.copies), checkpoint=unused_number)

    def close(self) -> None:
        """Send no more copies, and release the memory of kept states."""
        self._sent.stop()
        self._forget_kept()

    def read_kept(self, attempt: int, *, is_alive: bool) -> None:
        """Send the rank's small states to the controller; see `ReadKept`."""
        last = self._last_of(attempt)
        states = () if last is None or last.kept is None else last.kept.read()
        read = KeptRead(attempt=attempt, rank=self.rank, states=states, is_alive=is_alive)
        self._emit(read)

    def ask(self, call: WriteState, worker: WorkerConnection | None) -> None:
        """Ask a process for its state; see `WriteState`."""
        why = "its process is gone"
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

    def take_state(self, state: Copy) -> None:
        """Store what a survivor has written, unless it comes too late."""
        asked, self._asked = self._asked, None
        if asked is not None and asked.checkpoint == state.part.checkpoint:
            self._take_part(state.part, of_state(state, is_copy=False))
            if asked.kills:
                # It has nothing left to do. It takes a while to go, as storing does.
                self._kill(asked.attempt)

    def not_written(self, checkpoint: int, why: str) -> None:
        """Report that a survivor can't write its state, unless it is reported to be late."""
        asked = self._asked
        if asked is not None and asked.checkpoint == checkpoint:
            self._asked = None
            self._emit_unwritten(asked.attempt, why)

    def copied(self, copies: Mapping[int, Copy]) -> None:
        """Send a copy to another host, if it is this one's turn."""
        self._sent.made(copies)

    def send_copies(self, call: SendCopies, worker: WorkerConnection | None) -> None:
        """Send the next copy; see `SendCopies`."""
        copies = worker.copies if worker is not None else {}
        self._sent.send_from(call.attempt, call.number, call.common, copies)

    def store_copy(self, call: StoreCopy) -> None:
        """Store a copy of the rank's state, or of that of one which is lost with its agent."""
        if call.of_rank is not None:
            self._store_kept_copy(call, call.of_rank)
            return
        last = self._last_of(call.attempt)
        if last is not None and call.number in last.copies:
            self._take_copy(last, call.number, checkpoint=call.checkpoint)
        elif last is not None and call.number in self._sent.there:
            self._store_as(self._sent.there[call.number], call.checkpoint)
        else:
            why = f"it has no copy of step {call.number}"
            self._emit_unwritten(call.attempt, why, is_copy=True)

    def _store_kept_copy(self, call: StoreCopy, rank: int) -> None:
        kept = self._kept_copies
        found = None if kept is None else kept.copy(call.attempt, rank, call.number)
        if found is None:
            why = f"{self._host} has no copy of step {call.number}"
            self._emit_unwritten(call.attempt, why, is_copy=True, rank=rank)
            return
        copy, hashes = found
        checked = if_undamaged(of_state(copy, is_copy=True), hashes, host=self._host)
        self._store_as(copy, call.checkpoint, checked)

    def _take_copy(self, worker: WorkerConnection, number: int, *, checkpoint: int) -> None:
        copy = worker.copies[number]
        misplaced = misplaced_part(copy.part, scratch=self.scratch / COPIES, near=None)
        if misplaced is not None:
            self._emit(misplaced)
            self._emit_unwritten(worker.attempt, misplaced.failure.message, is_copy=True)
            return
        self._store_as(copy, checkpoint)

    def _store_as(self, copy: Copy, checkpoint: int, as_event: AsEvent | None = None) -> None:
        part = replace(copy.part, checkpoint=checkpoint)
        self._parts.take(part, as_event or of_state(copy, is_copy=True))

    def _state_is_late(self, call: WriteState) -> None:
        if self._asked is call:
            self._asked = None
            self._emit_unwritten(call.attempt, f"it took more than {call.limit_s:.1f} s")

    def _emit_unwritten(
        self, attempt: int, why: str, *, is_copy: bool = False, rank: int | None = None
    ) -> None:
        whose = self.rank if rank is None else rank
        self._emit(StateUnwritten(attempt=attempt, rank=whose, reason=why, is_copy=is_copy))

    def _last_of(self, attempt: int) -> WorkerConnection | None:
        """Return an attempt's connection, also once its process has ended."""
        last = self._last
        return last if last is not None and last.attempt == attempt else None

    def _forget_kept(self) -> None:
        if self._last is not None and self._last.kept is not None:
            self._last.kept.close()
        self._last = self._asked = None
