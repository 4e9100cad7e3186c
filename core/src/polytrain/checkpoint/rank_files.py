"""Whether ranks other than 0 report files that would be lost where only rank 0's are kept. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_REMEMBERED = 256
"""Reports that are compared at a time; ranks that train together are no further apart."""


@dataclass(slots=True)
class RankFiles:
    """Compares what the ranks of one attempt report at the same step."""

    _kept: dict[int, frozenset[str]] = field(default_factory=dict)
    _ignored: dict[int, dict[int, frozenset[str]]] = field(default_factory=dict)
    """Step → rank → the names of its files."""

    def kept(self, step: int, names: Collection[str]) -> str | None:
        """Rank 0 has reported these files; return what is wrong, if anything is."""
        self._kept[step] = frozenset(names)
        _forget_oldest(self._kept)
        ignored = self._ignored.pop(step, {})
        return next(filter(None, (self._lost(step, rank, ignored[rank]) for rank in ignored)), None)

    def ignored(self, step: int, rank: int, names: Collection[str]) -> str | None:
        """Another rank has reported these files; return what is wrong, if anything is."""
        if step in self._kept:
            return self._lost(step, rank, frozenset(names))
        self._ignored.setdefault(step, {})[rank] = frozenset(names)
        _forget_oldest(self._ignored)
        return None

    def _lost(self, step: int, rank: int, names: frozenset[str]) -> str | None:
        lost = sorted(names - self._kept[step])
        if not lost:
            return None
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return (
            f"rank {rank} reported the file {lost[0]!r}{others}, which rank 0's checkpoint doesn't "
            "have, and only rank 0's files are kept. Set CheckpointConfig(written_by='every_rank') "
            "to keep the files of all ranks, or written_by='rank_0' to keep rank 0's alone, and "
            "start over with fit(resume='never')"
        )


def _forget_oldest(by_step: dict[int, Any]) -> None:
    while len(by_step) > _REMEMBERED:
        del by_step[next(iter(by_step))]
