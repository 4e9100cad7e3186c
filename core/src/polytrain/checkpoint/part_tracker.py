"""Whether every rank hands in its part of every checkpoint. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PartTracker:
    """Counts the parts that each rank of one attempt has handed in.

    A rank may be slow. It is behind once another has gone on to a later checkpoint, waits for this
    one or has ended, and for a time nothing has come of it; or as soon as it has ended itself.
    """

    world_size: int
    retry_s: float
    _counts: dict[int, int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _waiting: set[int] = field(default_factory=set)
    _fewest: int = 0
    _behind_since: float | None = None

    def part_staged(self, rank: int, *, waits: bool, now: float) -> None:
        """A rank has handed in its part of the next checkpoint, and maybe waits for its commit."""
        self._counts[rank] = self._count(rank) + 1
        (self._waiting.add if waits else self._waiting.discard)(rank)
        self._look(now)

    def done(self, rank: int, *, now: float) -> None:
        """A rank's training is over."""
        self._done.add(rank)
        self._look(now)

    @property
    def deadline(self) -> float | None:
        """When `complaint` may have something to say that it hasn't yet."""
        return None if self._behind_since is None else self._behind_since + self.retry_s

    def overdue(self, *, now: float) -> tuple[int, str] | None:
        """The rank that is behind, and what is wrong; None while nothing is."""
        behind, ahead = self._extremes()
        if self._count(behind) == self._count(ahead):
            return None
        counts = (
            f"rank {behind} has reported {self._count(behind)} of them, and rank {ahead} "
            f"{self._count(ahead)}"
        )
        remedy = "Where every rank writes a part, all must report as many checkpoints"
        if behind in self._done:
            return behind, f"a checkpoint lacks a part: {counts}; rank {behind} has ended. {remedy}"
        if self.deadline is not None and now >= self.deadline:
            waited = f"for {self.retry_s:g} s nothing came of rank {behind}"
            return behind, f"a checkpoint lacks a part: {counts}; {waited}. {remedy}"
        return None

    def _look(self, now: float) -> None:
        behind, ahead = self._extremes()
        moved_on = self._count(ahead) - self._count(behind) > 1 or (
            self._stands_still(ahead) and self._count(ahead) > self._count(behind)
        )
        resumes, self._fewest = self._count(behind) > self._fewest, self._count(behind)
        if not moved_on:
            self._behind_since = None
        elif self._behind_since is None or resumes:
            self._behind_since = now

    def _extremes(self) -> tuple[int, int]:
        """The rank that is most behind, one that can't catch up first; and one that is ahead."""
        ranks = range(self.world_size)
        behind = min(ranks, key=lambda rank: (self._count(rank), rank not in self._done))
        return behind, max(ranks, key=lambda rank: (self._count(rank), self._stands_still(rank)))

    def _stands_still(self, rank: int) -> bool:
        return rank in self._done or rank in self._waiting

    def _count(self, rank: int) -> int:
        return self._counts.get(rank, 0)
