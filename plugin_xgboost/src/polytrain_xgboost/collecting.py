"""Collective operations on whatever can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xgboost import collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Those that train together; by default, one process by itself."""

    me: int = 0
    size: int = 1

    def gathered(self, piece: Any) -> list[Any]:
        """Everybody's piece, by rank. Every rank calls it."""
        if self.size == 1:
            return [piece]
        # In a list: XGBoost broadcasts everything but None.
        return [
            collective.broadcast([piece] if root == self.me else None, root)[0]
            for root in range(self.size)
        ]
