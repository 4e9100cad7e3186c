"""Asks the ranks that a loss has left for the newest state of the training, before they are killed.

Each rank keeps small states (`linux.kept_states`) that its agent can read. One survivor gets them
all, and writes what a checkpoint at the newest clean point holds. Whatever goes wrong costs a
bounded time: then the run continues from its last checkpoint, and the journal says why.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from polytrain.checkpoint.parts import StateWritten
from polytrain.errors import FailureKind
from polytrain.events.attempt import (
    CopiesHeld,
    CopyRefused,
    CopySent,
    KeepsNothing,
    KeepsState,
    KeptRead,
    StateUnwritten,
)
from polytrain.policy.copies import Sends
from polytrain.record.entries import SurvivorsAsked
from polytrain.record.journal import Journal
from polytrain.run.copies import RankCopies
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.states import Ending, Phase, State, Training
from polytrain.workers.agents.calls import (
    Kill,
    ReadKept,
    SurvivorEvent,
    WriteState,
)
from polytrain.workers.driver.group import WorkerGroup

logger = logging.getLogger(__name__)

_LIMIT_S = 1.0
_WRITE_S = 10.0
_BYTES_PER_S = 5e9
"""Agents have a second to read what is kept. Those that don't answer count as lost. Survivors then
wait for a clean point for a second, and the time that memory takes at this rate. A busy machine may
write the state slowly."""

_NOT_ASKED = (
    FailureKind.STORAGE,
    FailureKind.LEASE_LOST,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.REPLICAS_DIFFER,
    FailureKind.DIVERGED,
)
"""After these, a state couldn't be committed, or isn't to be trusted."""

_NOT_KEPT = "this training keeps no state that another rank could hand on"


def newest_point(kept: Mapping[int, KeptRead]) -> int | None:
    """Return the newest clean point that a rank has reached; None if none has reached any."""
    newest = max(map(_point, kept.values()), default=-1)
    return newest if newest >= 0 else None


def in_order(kept: Mapping[int, KeptRead], hung: Collection[int | None] = ()) -> list[int]:
    """Return the ranks whose processes live, in the order in which to ask them for the state.

    A rank that is ahead had all gradients of its last step. Rank 0's state is whole by itself.

    Args:
        hung: ranks that may not answer in the time that all have together. They come last.
    """
    living = [rank for rank, read in kept.items() if read.is_alive and _point(read) >= 0]
    return sorted(living, key=lambda rank: (rank in hung, -_point(kept[rank]), rank))


def _is_trusted(ending: Ending) -> bool:
    """Return whether an attempt's newest state may be committed."""
    return not {failure.kind for failure in ending.failures}.intersection(_NOT_ASKED)


def _has_failed(phase: Phase) -> bool:
    """Return whether an attempt has failed, and its newest state may be committed."""
    return isinstance(phase, Ending) and not phase.is_planned and _is_trusted(phase)


def _stops_at_once(state: State) -> bool:
    """Return whether a request ends the training without waiting for another checkpoint.

    It waits for one before it ends the attempt, unless it doesn't know of any, or is repeated.
    """
    stopped = None if state.drain is None else state.drain.stopped
    is_at_once = isinstance(state.phase, Training) or not state.saves
    return stopped is not None and not stopped.is_final and is_at_once


def _point(read: KeptRead) -> int:
    return max((state.point for state in read.states if not state.is_forecast), default=-1)


@dataclass(slots=True, kw_only=True)
class Survivors:
    """What is known of the survivors of the current attempt."""

    group: WorkerGroup
    journal: Journal
    deadlines: Deadlines
    has_copies: bool = False
    """Whether ranks copy their state. The only rank of an attempt isn't asked then."""

    _attempt: int = -1
    _world_size: int = 0
    _size: int = 0
    """Bytes of the training's state."""

    _keepers: set[int] = field(default_factory=set)
    """The ranks that keep their state."""

    _unkept: dict[int, str] = field(default_factory=dict)
    """The ranks that can't, and why."""

    _sacrificed: int | None = None
    """The rank that is killed so that the others wait for it, and can be asked; None if none is."""

    _kept: dict[int, KeptRead] = field(default_factory=dict)
    _left: list[int] = field(default_factory=list)
    """The ranks to ask next."""

    _asked: int | None = None
    """The rank that is asked for the state, and hasn't answered."""

    _hung: frozenset[int | None] = frozenset()
    """The ranks whose hang has ended the attempt."""

    _is_loss: bool = True
    """Whether a loss has ended the attempt, or a stop: then no end of a process counts."""

    _refused: dict[int, str] = field(default_factory=dict)
    _why_unanswered: str = ""
    """Why no survivor has written a state, though some were asked; empty if one has."""

    _number: int = 0
    _settle_until: float = 0.0
    """The monotonic time until which survivors may wait for a clean point."""

    _latest: float = math.inf
    """The monotonic time at which they are given up, however much there is to write."""

    _written: StateWritten | None = None
    _has_warned: bool = False
    copies: RankCopies = field(init=False)

    def __post_init__(self) -> None:
        self.copies = RankCopies(self.group, attempt=-1, sends=Sends(0))

    @property
    def is_alone(self) -> bool:
        """Whether the attempt's only rank copies its state."""
        return self.has_copies and self._world_size == 1

    @property
    def know_states(self) -> bool:
        """Whether the end of the training may leave a state that no checkpoint has."""
        return self.has_copies or (bool(self._keepers) and self._world_size > 1)

    @property
    def _is_asking(self) -> bool:
        return self.deadlines.at(Deadline.SURVIVORS) is not None

    def launched(self, attempt: int, world_size: int) -> None:
        """Note that an attempt starts."""
        self._attempt, self._world_size, self._size = attempt, world_size, 0
        self._wait_until(None)
        self._written, self._why_unanswered = None, ""
        self._sacrificed = self._asked = None
        self._hung, self._is_loss = frozenset(), True
        for known in (self._keepers, self._unkept, self._kept, self._left, self._refused):
            known.clear()
        self.copies = RankCopies(self.group, attempt=attempt, sends=Sends(world_size))

    def ask(self, state: State, *, number: int) -> bool:
        """Ask the survivors, and kill them later; return whether there is anybody to ask.

        Args:
            state: the run's state: its attempt is about to end.
            number: a number for the checkpoint, which no other has.
        """
        ending = state.phase
        if not isinstance(ending, Ending):
            # All processes were gone at once.
            return False
        if ending.is_planned:
            return _stops_at_once(state) and self.ask_at_stop(number=number)
        if not _is_trusted(ending) or self.is_alone:
            return False
        if not self._keepers:
            if not self.has_copies:
                # Copies are looked for when all processes are gone.
                self._say_why_not(state)
            return False
        self._begin(number, _LIMIT_S)
        self._hung = frozenset(
            failure.rank for failure in ending.failures if failure.kind is FailureKind.HANG
        )
        self._is_loss = any(failure.kind.is_loss for failure in ending.failures)
        self.group.call(ReadKept(attempt=self._attempt))
        for rank in ending.lost_agents:
            self.lost(rank)
        return True

    def ask_at_stop(self, *, number: int, latest: float = math.inf) -> bool:
        """Ask the ranks of a training that a stop ends at once; return whether any is asked.

        The last one is killed: then the others wait for it, and have a state that stays.

        Args:
            number: see `ask`.
            latest: the monotonic time at which they are given up.
        """
        if not self._keepers or self._world_size == 1:
            return False
        # Its memory is freed, and what it has reported is stored, before it is gone.
        self._begin(number, _LIMIT_S + self._size / _BYTES_PER_S, latest)
        self._sacrificed = self._world_size - 1
        self.group.call(Kill(attempt=self._attempt), (self._sacrificed,))
        return True

    def gone(self, rank: int) -> None:
        """Note that a rank's process is gone."""
        # Its peers may notice that first, and their errors have ended the attempt.
        self._is_loss = self._is_loss or self._is_asking
        if self._is_asking and rank == self._sacrificed:
            self._wait_until(time.monotonic() + _LIMIT_S)
            self.group.call(ReadKept(attempt=self._attempt))

    def _begin(self, number: int, within_s: float, latest: float = math.inf) -> None:
        self._number, self._latest = number, latest
        self._wait_until(time.monotonic() + within_s)

    def store_copies(self, state: State, *, number: int) -> bool:
        """Have the newest copies of which every rank has one stored; return whether there are any.

        Args:
            state: the run's state: all processes of its attempt are gone.
            number: a number for the checkpoint, which no other has.
        """
        if self._is_asking:
            self._end_without(self._refusals or "all ranks were lost at once")
        is_wanted = self.has_copies and self._world_size > 1 and self._written is None
        if not is_wanted or not (_has_failed(state.phase) or _stops_at_once(state)):
            return False
        is_any = self.copies.store(number)
        if not is_any:
            self._say_why_no_copy(state)
        return is_any

    def take(self, event: SurvivorEvent) -> None:
        """Handle what an agent says about its rank."""
        if event.attempt != self._attempt:
            return
        match event:
            case KeepsState(rank=rank, size=size):
                self._keepers.add(rank)
                self._size = max(self._size, size)
            case KeepsNothing(rank=rank, reason=reason):
                self._unkept[rank] = reason
            case KeptRead(rank=rank) if self._is_asking and rank not in self._kept:
                self._know(event)
            case CopyRefused() | CopiesHeld() | CopySent():
                self.copies.take(event)
            case StateWritten(is_copy=True) if self._world_size == 1:
                # It comes after the end of the only rank's process, whatever the end was.
                self._written = event
            case StateWritten(is_copy=True) if self.copies.are_stored:
                whole = self.copies.stored(event)
                if isinstance(whole, str):
                    self.refused(whole)
                else:
                    self._written = whole
            case StateUnwritten(reason=reason) if self.is_alone:
                self.refused(reason)
            case StateUnwritten(rank=rank, reason=reason, is_copy=True) if self.copies.are_stored:
                self.copies.stop()
                self.refused(f"rank {rank}: {reason}")
            case StateWritten() if self._is_asking:
                self._written = event
                self._end()
            case StateUnwritten(rank=rank, reason=reason) if rank == self._asked:
                self._refuses(rank, reason)

    def _know(self, read: KeptRead) -> None:
        """Note a rank's small states, and ask for the whole state once all ranks' are known."""
        self._kept[read.rank] = read
        if len(self._kept) == self._world_size:
            self._left = in_order(self._kept, self._hung)
            settles_s = _LIMIT_S + self._size / _BYTES_PER_S
            self._settle_until = min(time.monotonic() + settles_s, self._latest)
            self._wait_until(self._settle_until + _WRITE_S)
            self._ask_next()

    def _know_nothing_of(self, rank: int) -> None:
        self._know(KeptRead(attempt=self._attempt, rank=rank, states=(), is_alive=False))

    def lost(self, rank: int) -> None:
        """Note that a rank's agent is lost: a survivor may know its small states from elsewhere."""
        if self._is_asking and rank not in self._kept:
            self._know_nothing_of(rank)
        elif rank in self._left:
            self._left.remove(rank)
        elif rank == self._asked:
            self._refuses(rank, "its agent is lost")

    def copies_lost(self, rank: int) -> None:
        """Note that a rank's agent is lost, and its copies with it."""
        self.copies.lost(rank)
        if self.copies.are_stored:
            self.copies.stop()
            self.refused(f"rank {rank}'s copy is lost with its agent")

    def overdue(self) -> None:
        """Go on without the agents that haven't answered in time, or stop asking."""
        silent = sorted(set(range(self._world_size)).difference(self._kept))
        if not silent or not self._kept:
            self._end_without(self._refusals or "the survivors didn't answer in time")
            return
        # Their hosts may be gone, which is noticed later.
        for rank in silent:
            self._know_nothing_of(rank)

    def written(self, state: State) -> StateWritten | None:
        """Remove and return the state that a survivor has written, as rank 0's part.

        Args:
            state: the run's state: its attempt is about to end.
        """
        written, self._written = self._written, None
        if written is None or (isinstance(state.phase, Ending) and not _is_trusted(state.phase)):
            return None
        if written.is_joined:
            return written
        files = tuple(replace(file, rank=0) for file in written.part.files)
        return replace(written, part=replace(written.part, rank=0, files=files))

    def _say_why_not(self, state: State) -> None:
        """Say why no rank keeps a state that another could hand on."""
        if self._unkept:
            self.refused(self._unkept[min(self._unkept)])
        elif self._world_size > 1 and state.has_reported:
            # No warning: most backends have nothing that keeps a state.
            self._note(reason=_NOT_KEPT)

    def _say_why_no_copy(self, state: State) -> None:
        """Say why there is neither a survivor's state nor a copy that all ranks have."""
        why = [self._why_unanswered] if self._why_unanswered else []
        why += self.copies.why_none(self._unkept)
        if why:
            self.refused("; ".join(why))
        elif not self._keepers:
            self._say_why_not(state)

    @property
    def _refusals(self) -> str:
        return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self._refused.items()))

    def _refuses(self, rank: int, why: str) -> None:
        self._refused[rank] = why
        self._ask_next()

    def _ask_next(self) -> None:
        point = newest_point(self._kept)
        if point is None or not self._left:
            self._end_without(self._refusals or "no rank has finished a step")
            return
        # The agent's limit comes first: its answer says why.
        now, until = time.monotonic(), self.deadlines.at(Deadline.SURVIVORS) or 0.0
        call = WriteState(
            attempt=self._attempt,
            checkpoint=self._number,
            point=point,
            kept={rank: read.states for rank, read in self._kept.items()},
            settles_s=max(0.0, (self._settle_until - now) * 0.9),
            limit_s=max(0.0, (until - now) * 0.9),
            kills=self._is_loss,
        )
        self._asked = self._left.pop(0)
        self.group.call(call, (self._asked,))

    def committed(self, written: StateWritten) -> None:
        """Note that a survivor's state is a checkpoint."""
        rank, step = written.rank, written.part.step
        holders = self.copies.holders if written.is_joined else {}
        ranks = range(self._world_size) if written.is_joined else (rank,)
        hosts = tuple(dict.fromkeys(self._host(holders.get(each, each)) for each in ranks))
        self._note(rank=rank, step=step, hosts=hosts)
        whose = "all ranks had copied" if written.is_joined else f"rank {rank} had kept"
        where = "".join(
            f", rank {each}'s copy from {self._host(holder)}" for each, holder in holders.items()
        )
        logger.info("The state after step %d, which %s%s, is committed.", step, whose, where)

    def _host(self, rank: int) -> str:
        return self.group.members[rank].host

    def refused(self, reason: str, *, are_steps_lost: bool = True) -> None:
        """Note that there is no checkpoint of a survivor's state."""
        self._note(reason=reason)
        if not are_steps_lost:
            return
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        why = "Steps since the last checkpoint are repeated, if there are any: %s."
        logger.log(level, why, reason)

    def _note(
        self,
        *,
        rank: int | None = None,
        step: int | None = None,
        hosts: tuple[str, ...] = (),
        reason: str = "",
    ) -> None:
        self.journal.write(
            SurvivorsAsked(attempt=self._attempt, rank=rank, step=step, hosts=hosts, reason=reason)
        )

    def _end_without(self, reason: str) -> None:
        if self.has_copies:
            # They are looked for when all processes are gone.
            self._why_unanswered = reason
        else:
            self.refused(reason)
        self._end()

    def _wait_until(self, limit: float | None) -> None:
        """Wait for answers until a monotonic time; no longer if it is None."""
        if limit is not None:
            limit = min(limit, self._latest)
        self.deadlines.set(Deadline.SURVIVORS, limit)

    def _end(self) -> None:
        self._asked = None
        self._wait_until(None)
        self.group.call(Kill(attempt=self._attempt))
