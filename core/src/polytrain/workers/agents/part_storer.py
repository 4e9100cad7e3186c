"""Stores an agent's parts of checkpoints, one at a time, on a thread that no program waits for.

The state that a survivor has written, or a copy, has a thread of its own and a limited time: a
restart waits for it, and can do without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import (
    PartStored,
    PartVoid,
    StagedPart,
    StateWritten,
    clear_staged,
    kept_if_unstored,
    stored_part,
)
from polytrain.checkpoint.staging import clear_of_rank, remove, size_of
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Failed, StateUnwritten
from polytrain.storage.calls import PATIENCE_S, StorageHealth, retries_limited
from polytrain.workers.agents.calls import AgentEvent
from polytrain.workers.agents.kept_copies import damaged
from polytrain.workers.agents.sent_copies import Copy, Hashes
from polytrain.workers.processes.loop_thread import in_daemon_thread

_STATE_WITHIN_S = 20.0
_STATE_BYTES_PER_S = 50e6
"""The storage has this time to take a state, and more for a large one."""

StoredAlready = Mapping[str, str]
"""Name → SHA-256 of files that are stored already."""


Outcome = PartStored | PartVoid | Failed
"""The outcome of storing a part."""

AsEvent = Callable[[Outcome], AgentEvent]


class PartStorer:
    """Stores one part at a time, on its own threads. Its methods run on one event loop."""

    def __init__(
        self, store: CheckpointStore, *, merges_files: bool, emit: Callable[[AgentEvent], None]
    ) -> None:
        """
        Args:
            store: the run's checkpoints.
            merges_files: whether ranks other than 0 store only files that rank 0's part lacks.
            emit: called with the outcome of each part.
        """
        self._store = store
        self._merges_files = merges_files
        self._emit = emit
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._turn_of_state = asyncio.Lock()
        self._late: asyncio.Future[Outcome] | None = None
        """A state that the storage still hasn't taken: the next ones don't wait for it again."""

        self._health_of_states: tuple[AttemptId | None, StorageHealth] = None, StorageHealth()
        """That of the storage as the states of one attempt have met it. That a state comes too late
        says nothing about the storage of checkpoints, or about that of a later attempt."""

        self._tasks: set[asyncio.Task[None]] = set()
        self._rank_0: dict[tuple[int, int], asyncio.Future[StoredAlready | None]] = {}
        """Attempt and number of a checkpoint → future files of rank 0, for a waiting part."""

        self._unstored: dict[int, StagedPart] = {}
        """Checkpoint → the part that is being stored, or waits for that."""

        self._copies: dict[int, Path] = {}
        """Checkpoint → this node's copy, for an attempt that resumes from it."""

        self._shortened = ExitStack()
        """Holds the limit on retries, once there is one."""

    def take(self, part: StagedPart, as_event: AsEvent | None = None) -> None:
        """Store a part. With merged files, parts of ranks above 0 wait for `store_rest`.

        Args:
            as_event: returns the event of the outcome, if the part is a survivor's whole state, and
                waits for nobody.
        """
        loop = asyncio.get_running_loop()
        rank_0: asyncio.Future[StoredAlready | None] = loop.create_future()
        if part.rank != 0 and self._merges_files and as_event is None:
            self._rank_0[part.attempt_id.attempt, part.checkpoint] = rank_0
        else:
            rank_0.set_result({})
        task = loop.create_task(self._store_part(part, rank_0, as_event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def store_rest(
        self, attempt: int, checkpoint: int, stored_already: StoredAlready | None
    ) -> None:
        """Store a waiting part without the files that rank 0 has stored; None drops the part."""
        rank_0 = self._rank_0.pop((attempt, checkpoint), None)
        if rank_0 is not None:
            rank_0.set_result(stored_already)

    def hurry(self) -> None:
        """Retry no longer than a few seconds from now on: a signal ends the run."""
        self._shortened.close()
        self._shortened.enter_context(retries_limited(lambda: PATIENCE_S))

    async def finish(self) -> None:
        """Wait until all parts are stored or dropped; a state may be late."""
        await asyncio.gather(*self._tasks)

    def clear(self, scratch: Path, of: AttemptId, rank: int) -> None:
        """Delete what a rank's ended process had begun to stage in the run's directory here."""
        spared = frozenset(self._copies.values())
        in_daemon_thread(clear_of_rank, scratch, of, rank, spared, else_here=True)

    def forget_copies(self, *, before: int) -> None:
        """Delete the local copies of older checkpoints: no attempt resumes from them."""
        for number in [number for number in self._copies if number < before]:
            in_daemon_thread(remove, self._copies.pop(number), else_here=True)

    def close(self) -> None:
        """Stop after the part that is being stored; keep what a dead storage hasn't taken."""
        if self._store.location.health.has_failed:
            for part in self._unstored.values():
                kept_if_unstored(self._store, part)
        self._is_closed = True
        self._shortened.close()

    async def _store_part(
        self,
        part: StagedPart,
        rank_0: asyncio.Future[StoredAlready | None],
        as_event: AsEvent | None,
    ) -> None:
        stored_already = await rank_0
        if stored_already is None:
            await in_daemon_thread(clear_staged, part, else_here=True)
            return
        if as_event is not None:
            # Its time begins when those before are stored, or late.
            async with self._turn_of_state:
                if not self._is_closed:
                    await self._store_state(part, as_event)
            return
        self._unstored[part.checkpoint] = part
        async with self._turn:
            if self._is_closed:
                return
            outcome = await _stored_by_thread(self._store, part, stored_already)
        del self._unstored[part.checkpoint]
        self._keep(part)
        self._emit(outcome)

    async def _store_state(self, part: StagedPart, as_event: AsEvent) -> None:
        limit_s = _limit_s(part)
        location = self._store.location
        if self._health_of_states[0] != part.attempt_id:
            self._health_of_states = part.attempt_id, StorageHealth()
        limited = replace(
            location,
            retry_s=min(location.retry_s, limit_s),
            health=self._health_of_states[1],
        )
        reason = f"{location.address} is still taking an earlier state"
        if self._late is None or self._late.done():
            reason = f"{location.address} hasn't taken its state within {limit_s:.0f} s"
            store = CheckpointStore(location=limited)
            storing = asyncio.ensure_future(_stored_by_thread(store, part, {}))
            await asyncio.wait([storing], timeout=limit_s)
            self._late = None if storing.done() else storing
        if self._late is None:
            self._keep(part)
            self._emit(as_event(storing.result()))
            return
        late = PartVoid(
            attempt=part.attempt_id.attempt,
            rank=part.rank,
            checkpoint=part.checkpoint,
            reason=reason,
        )
        self._emit(as_event(late))

    def _keep(self, part: StagedPart) -> None:
        """Note the copy of a part that is still on this node: an attempt may resume from it."""
        if not self._store.location.is_local and part.staged is not None:
            self._copies[part.checkpoint] = part.staged


async def _stored_by_thread(
    store: CheckpointStore, part: StagedPart, stored_already: StoredAlready
) -> Outcome:
    try:
        return await in_daemon_thread(_stored, store, part, stored_already)
    except RuntimeError as error:  # the system refuses the thread
        failure = Failure(
            kind=FailureKind.STORAGE, rank=part.rank, message=f"{type(error).__name__}: {error}"
        )
        return Failed(attempt=part.attempt_id.attempt, failure=failure)


def _stored(store: CheckpointStore, part: StagedPart, stored_already: StoredAlready) -> Outcome:
    """Store a part; delete what is staged, which takes a while, if the storage is a directory."""
    outcome = stored_part(store, part, stored_already)
    if store.location.is_local:
        clear_staged(part)
    return outcome


def _limit_s(part: StagedPart) -> float:
    """Return how long to wait until a state is stored."""
    size = 0 if part.staged is None else size_of(part.staged)
    return _STATE_WITHIN_S + size / _STATE_BYTES_PER_S


def of_state(state: Copy, *, is_copy: bool) -> AsEvent:
    """Return what makes an event of a state: that it can't be stored is no failure.

    Args:
        state: a copy, or what a survivor has written.
        is_copy: which of them.
    """
    attempt, rank = state.part.attempt_id.attempt, state.part.rank

    def event(outcome: Outcome) -> AgentEvent:
        if isinstance(outcome, PartStored):
            return StateWritten(
                attempt=attempt,
                rank=rank,
                part=outcome,
                is_report=state.is_report,
                is_ahead=state.is_ahead,
                is_earlier=state.is_earlier,
                is_copy=is_copy,
                reports=state.reports,
            )
        why = outcome.reason if isinstance(outcome, PartVoid) else outcome.failure.message
        return StateUnwritten(attempt=attempt, rank=rank, reason=why, is_copy=is_copy)

    return event


def if_undamaged(as_event: AsEvent, hashes: Hashes, *, host: str) -> AsEvent:
    """Return what makes an event of a stored copy only if its files are those that were sent.

    Args:
        as_event: makes the event.
        hashes: name → SHA-256 of the files that were sent.
        host: where the copy lay.
    """

    def event(outcome: Outcome) -> AgentEvent:
        if isinstance(outcome, PartStored):
            stored = {file.name: file.sha256 for file in outcome.files}
            name = damaged(stored, hashes)
            if name:
                outcome = PartVoid(
                    attempt=outcome.attempt,
                    rank=outcome.rank,
                    checkpoint=outcome.checkpoint,
                    reason=f"its copy on {host} is damaged: {name} isn't what was sent",
                )
        return as_event(outcome)

    return event
