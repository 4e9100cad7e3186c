"""Per-rank states in checkpoints: random states, and positions in streamed data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from polytrain import get_context
from polytrain_torch import randomness
from polytrain_torch.checkpoints.safe_serialization import save_safely
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.loaders import stream_places


def save_rank_states(directory: Path | None) -> None:
    """Write all ranks' states, or this rank's if every rank writes. All ranks call this.

    `directory` is this rank's part of the checkpoint; None if it has none.

    Raises:
        TypeError: a data set's state isn't plain data, and couldn't be loaded safely.
    """
    rank = dist.get_rank()
    mine = own_rank_state()
    if get_context().every_rank_writes():
        assert directory is not None
        write_rank_state(directory, rank, mine)
        return
    by_rank = gathered(mine)
    if directory is not None and rank == 0:
        for number, each in enumerate(by_rank):
            write_rank_state(directory, number, each)


def own_rank_state() -> tuple[Any, Any]:
    """Return this rank's random states, and its places in streamed data."""
    return randomness.random_state(), stream_places.states()


def write_rank_state(directory: Path, rank: int, states: tuple[Any, Any]) -> None:
    """Write a rank's states, as `own_rank_state` has returned them there.

    Raises:
        TypeError: a data set's state isn't plain data, and couldn't be loaded safely.
    """
    random, places = states
    torch.save(random, directory / randomness.file_of(rank))
    if places:
        save_safely(places, directory / stream_places.file_of(rank))
