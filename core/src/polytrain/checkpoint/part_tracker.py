"""Tracks whether every rank stages its part of every checkpoint. Pure: the caller has the clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PartTracker:
    """Counts the parts that each rank of one attempt has staged.

    A rank may be slow. It is overdue if another rank is at a later checkpoint, waits for this one
    or has ended, and this rank stages nothing for `timeout_s`. A rank that ends without its part
    is overdue at once.
    """

    ranks: set[int]
    """Ranks that are known to stage parts."""

    timeout_s: float
    _counts: dict[int, int] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _waiting: set[int] = field(default_factory=set)
    _fewest: int = 0
    _behind_since: float | None = None

    def part_staged(self, rank: int, *, waits: bool, now: float) -> None:
        """Note that a rank has staged its next part, and whether it waits for the commit."""
        self._counts[rank] = self._count(rank) + 1
        (self._waiting.add if waits else self._waiting.discard)(rank)
        self._look(now)

    def expect(self, rank: int) -> None:
        """Count this rank among those that stage parts."""
        self.ranks.add(rank)

    def done(self, rank: int, *, now: float) -> None:
        """Note that a rank's training has ended."""
        self._done.add(rank)
        self._look(now)

    @property
    def deadline(self) -> float | None:
        """The time at which to call `overdue` again; None if no rank is behind."""
        return None if self._behind_since is None else self._behind_since + self.timeout_s

    def overdue(self, *, now: float) -> tuple[int, str] | None:
        """Return the rank that is overdue, and the error message; None if there is none."""
        behind, ahead = self._extremes()
        if self._count(behind) == self._count(ahead):
            return None
        counts = (
            f"rank {behind} has reported {self._count(behind)} of them, and rank {ahead} "
            f"{self._count(ahead)}"
        )
        remedy = (
            "All ranks that report checkpoints must report as many of them; with "
            "CheckpointConfig(written_by='rank_0') only rank 0's count"
        )
        if behind in self._done:
            return behind, f"a checkpoint lacks a part: {counts}; rank {behind} has ended. {remedy}"
        if self.deadline is not None and now >= self.deadline:
            waited = f"rank {behind} has reported none for {self.timeout_s:g} s"
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
        """Return the rank that is furthest behind, preferring one that has ended, and one ahead."""
        behind = min(
            sorted(self.ranks), key=lambda rank: (self._count(rank), rank not in self._done)
        )
        # Include ranks that needn't stage parts: a part that one does stage waits for the others'.
        seen = sorted(self.ranks | self._counts.keys())
        return behind, max(seen, key=lambda rank: (self._count(rank), self._stands_still(rank)))

    def _stands_still(self, rank: int) -> bool:
        return rank in self._done or rank in self._waiting

    def _count(self, rank: int) -> int:
        return self._counts.get(rank, 0)
