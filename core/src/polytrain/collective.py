"""Collective calls of a training function, whichever framework it uses.

Every rank makes the same calls, in the same order. Each also sends its call and the calling line,
so that an error can name ranks that differ.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgpack

from polytrain.functions.pickling import dumps
from polytrain.workers.session.worker_api import gather_over_ranks, get_context

__all__ = ["barrier", "broadcast_from_rank_zero"]


Data = TypeVar("Data")


def barrier() -> None:
    """Wait until all ranks have called this.

    Raises:
        RuntimeError: another rank makes another call of `polytrain.collective`.
        NotInWorkerError: outside a training function.
    """
    _called("barrier()", b"")


def broadcast_from_rank_zero(data: Data) -> Data:
    """Return rank 0's data on every rank. All ranks call this.

    Args:
        data: rank 0's data: anything that can be pickled. Data of other ranks are ignored.

    Raises:
        RuntimeError: another rank makes another call of `polytrain.collective`.
        NotInWorkerError: outside a training function.
        pickle.PicklingError, TypeError: rank 0's data can't be pickled.
    """
    is_sender = get_context().get_world_rank() == 0
    sent = _called("broadcast_from_rank_zero()", dumps(data) if is_sender else b"")
    if is_sender:
        return data
    received: Data = pickle.loads(sent)
    return received


def _called(call: str, data: bytes) -> bytes:
    """Make a call on every rank, and return rank 0's data."""
    name = f"polytrain.collective.{call}"
    piece = msgpack.packb([name, _place(sys._getframe()), data])
    calls = [msgpack.unpackb(each) for each in gather_over_ranks(piece, call=name)]
    _expect_same([(called, place) for called, place, _ in calls])
    sent: bytes = calls[0][2]
    return sent


def _expect_same(calls: Sequence[tuple[str, str]]) -> None:
    first, place = calls[0]
    for rank, (other, other_place) in enumerate(calls):
        if other != first:
            raise RuntimeError(
                f"rank 0 is in {first} ({place}), and rank {rank} in {other} ({other_place}): all "
                "ranks must make the same calls, in the same order. Make this call on every rank, "
                "not only on some (if rank == 0: …)."
            )


def _place(frame: FrameType) -> str:
    """Return the line of the user's code that made the call."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_globals.get("__name__", "").partition(".")[0] != "polytrain":
            frame = outer
            break
        outer = outer.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
