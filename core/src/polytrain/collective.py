"""Collective calls of a training function, whichever framework it uses.

Every rank makes the same calls, in the same order.
"""

from __future__ import annotations

from polytrain.workers.session.collective_calls import barrier, broadcast_from_rank_zero

__all__ = ["barrier", "broadcast_from_rank_zero"]
