"""Tracks the copies of all ranks' states: on which nodes they are, sent, dropped or stored.

Each rank's agent says what it has. The newest copy that all ranks have becomes a checkpoint once
all processes are gone, and no survivor has written a state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from polytrain.checkpoint.parts import StateWritten
from polytrain.events.attempt import CopiesHeld, CopyRefused, CopySent
from polytrain.policy.copies import Sends, to_keep
from polytrain.workers.agents.calls import DropCopy, SendCopies, StoreCopy
from polytrain.workers.driver.group import WorkerGroup

logger = logging.getLogger(__name__)

_NONE_IN_COMMON = "there is no step of which every rank has left a copy"


def newest_common(held: Mapping[int, Collection[int]], ranks: int) -> int | None:
    """Return the newest copy that every rank has; None if there is none.

    Args:
        held: rank → its copies.
    """
    common = set.intersection(*map(set, held.values())) if len(held) == ranks else set()
    return max(common, default=None)


def belongs_to(part: StateWritten, first: StateWritten) -> bool:
    """Return whether two ranks' parts are of one moment: as far as both know it."""
    positions = first.part.positions
    return (
        (part.part.step, part.is_report, part.is_ahead)
        == (first.part.step, first.is_report, first.is_ahead)
    ) and all(positions.get(name, at) == at for name, at in part.part.positions.items())


@dataclass(slots=True)
class RankCopies:
    """The copies of one attempt's ranks."""

    group: WorkerGroup
    attempt: int
    sends: Sends
    holders: dict[int, int] = field(default_factory=dict)
    """Rank → rank whose agent stores its copy, where its own agent hasn't it."""

    _held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank → the copies of its part that it has left."""

    _lent: dict[int, dict[int, int]] = field(default_factory=dict)
    """Rank → number of a copy that lies on another host → the rank whose agent keeps it there."""

    _lost: set[int] = field(default_factory=set)
    """The ranks whose agents are lost, with the copies that these had."""

    _is_unsent: bool = False
    """Whether a rank's copies can't be sent to another host."""

    _uncopied: dict[int, str] = field(default_factory=dict)
    """The ranks that couldn't make a copy of their part, and why not the last time."""

    _dropped: int = 0
    """The newest copy that all ranks were asked to drop."""

    _are_over: bool = False
    """Whether all ranks were asked to make no more copies."""

    _stored: dict[int, StateWritten] | None = None
    """Rank → its part of the state, of which copies are being stored; None if none are."""

    @property
    def are_stored(self) -> bool:
        """Whether agents store the ranks' copies of one step."""
        return self._stored is not None

    def take(self, event: CopiesHeld | CopySent | CopyRefused) -> None:
        """Note which copies a rank has, has sent, or can't make."""
        match event:
            case CopiesHeld(rank=rank, numbers=numbers):
                self._held[rank] = numbers
            case CopySent():
                self._note_sent(event)
            case CopyRefused():
                self._drop(event)

    def lost(self, rank: int) -> None:
        """Note that a rank's agent is lost, and with it the copies that it had."""
        self._lost.add(rank)
        self._held.pop(rank, None)
        for lent in self._lent.values():
            for number in [number for number, holder in lent.items() if holder == rank]:
                del lent[number]

    def store(self, number: int) -> bool:
        """Have the newest copies of which every rank has one stored; return whether there are any.

        Args:
            number: of their checkpoint.
        """
        newest = newest_common(self._there, self.sends.world_size)
        if newest is None:
            return False
        self._stored = {}
        call = StoreCopy(attempt=self.attempt, checkpoint=number, number=newest)
        ranks = range(self.sends.world_size)
        own = {rank for rank in ranks if newest in self._held.get(rank, ())}
        self.holders = {rank: self._lent[rank][newest] for rank in ranks if rank not in own}
        self.group.call(call, own if self.holders else None)
        for rank, holder in self.holders.items():
            self.group.call(replace(call, of_rank=rank), (holder,))
        return True

    def stored(self, part: StateWritten) -> StateWritten | str | None:
        """Note that a rank's copy is stored.

        Returns:
            All ranks' parts as one state, or why they are none; None until the last is stored.
        """
        assert self._stored is not None
        self._stored[part.rank] = part
        if len(self._stored) < self.sends.world_size:
            return None
        stored, self._stored = self._stored, None
        first = stored[0]
        odd = next((rank for rank, each in stored.items() if not belongs_to(each, first)), None)
        if odd is not None:
            return f"ranks 0 and {odd} made their copies at different places of the training"
        files = tuple(file for rank in sorted(stored) for file in stored[rank].part.files)
        return replace(first, part=replace(first.part, files=files), is_joined=True)

    def stop(self) -> None:
        """Wait no longer for copies to be stored."""
        self._stored = None

    def why_none(self, unkept: Mapping[int, str]) -> list[str]:
        """Return why no step has a copy of every rank; empty if no rank has ever had one.

        Args:
            unkept: the ranks that can't keep their state, and why.
        """
        if not (self._held or self._uncopied or self._lost):
            return []
        unable = {**unkept, **self._uncopied}
        return [
            _NONE_IN_COMMON,
            *(f"rank {rank} couldn't copy: {unable[rank]}" for rank in sorted(unable)),
            *(f"rank {rank}'s copies were lost with its agent" for rank in sorted(self._lost)),
        ]

    @property
    def _there(self) -> dict[int, set[int]]:
        """Rank → its copies, with its own agent or on another host."""
        ranks = {*self._held, *(rank for rank, lent in self._lent.items() if lent)}
        return {rank: {*self._held.get(rank, ()), *self._lent.get(rank, ())} for rank in ranks}

    def _note_sent(self, sent: CopySent) -> None:
        """Note where a rank's copy lies too, and have all ranks send the next one after the last.

        From then on only one of each rank is sure to be there until the next one is.
        """
        if sent.holder is None:
            if not self._is_unsent:
                logger.warning("Copies of the training's state lie on one host: %s.", sent.reason)
            self._is_unsent = True
            return
        self._lent.setdefault(sent.rank, {})[sent.number] = sent.holder
        following = self.sends.sent(sent.rank, sent.number, sent.newest)
        if following is None:
            return
        common = self.sends.common
        for lent in self._lent.values():
            for number in set(lent) - {to_keep(lent, common)}:
                del lent[number]
        self.group.call(SendCopies(attempt=self.attempt, number=following, common=common))

    def _drop(self, refused: CopyRefused) -> None:
        """Have all ranks drop a copy that one couldn't make: they have the one before."""
        self._uncopied[refused.rank] = refused.reason
        is_news = refused.number > self._dropped or refused.is_last
        if self._are_over or not is_news:
            return
        self._dropped = max(self._dropped, refused.number)
        self._are_over = refused.is_last
        drop = DropCopy(attempt=self.attempt, number=refused.number, is_last=self._are_over)
        # The rank that waits comes last: when it is asked, all have been.
        self.group.call(drop, set(range(self.sends.world_size)) - {refused.rank})
        self.group.call(drop, (refused.rank,))
