"""Collective operations on whatever can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from xgboost import collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Those that train together; by default, one process by itself. Every rank calls all of it."""

    me: int = 0
    size: int = 1

    def gathered(self, piece: Any) -> list[Any]:
        """Everybody's piece, by rank."""
        return [self._reported(piece, root) for root in range(self.size)]

    def told(self, piece: Any) -> Any:
        """Rank 0's piece, for everybody."""
        return self._reported(piece, 0)

    def any(self, flag: bool) -> bool:
        """Whether somebody says so."""
        if self.size == 1:
            return flag
        return bool(collective.allreduce(np.array([flag], np.int32), collective.Op.MAX)[0])

    def _reported(self, piece: Any, root: int) -> Any:
        if self.size == 1:
            return piece
        # In a list: XGBoost broadcasts everything but None.
        return collective.broadcast([piece] if root == self.me else None, root)[0]
