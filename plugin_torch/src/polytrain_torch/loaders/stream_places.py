"""The places of loaders that are different on each rank, in checkpoints that all ranks make.

Loaders of iterable data sets have a state, which belongs to the middle of an epoch. Loaders that
aren't split may be prepared by one rank alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from polytrain import get_context
from polytrain.extension import Cursor, DataPosition, Epoch, starting_checkpoint
from polytrain_torch.checkpoints.safe_serialization import loaded

logger = logging.getLogger(__name__)


class StreamPlace:
    """The place of one loader on this rank.

    Args:
        name: its name in checkpoints.
        cursor: counts its epochs and their batches.
        holder: has the state of an iteration, and loads one for the next iteration.
        seed: of the loader's worker processes.
        taken: number of batches of the epoch that the training function has got. By default, it is
            the number that the loader has given; a library may be one behind.

    Raises:
        ValueError: the checkpoint has places of another number of ranks.
    """

    def __init__(
        self,
        name: str,
        cursor: Cursor[DataPosition],
        holder: Any,
        *,
        seed: int,
        taken: Callable[[], int] | None = None,
    ) -> None:
        self.cursor = cursor
        self.seed = seed
        self._name = name
        self._holder = holder
        self._taken = taken
        self._given = 0
        self._states: list[Any] = []
        """After the last batch but one, and after the last one."""

        self._resumed = self._saved()
        _places()[name] = self

    def begin(self, epoch: Epoch) -> None:
        """The next iteration is over this epoch."""
        saved, self._resumed = self._resumed, None
        self._given = 0
        self._states = []
        if not epoch.start:
            return
        if saved is None or saved["epoch"] != epoch.number:
            logger.warning(
                "%s: its place isn't in the checkpoint, so its epoch %d begins again. Make "
                "checkpoints with TrainingState.",
                *(self._name, epoch.number),
            )
            return
        self._given = saved["given"]
        self._holder.load_state_dict(saved["state"])

    def given(self, epoch: Epoch) -> None:
        """A batch is given to the training function."""
        self._given += 1
        if self._taken is not None:
            self._states = [*self._states[-1:], copy.deepcopy(self._holder.state_dict())]
        epoch.given(self._given)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of it; None between two epochs."""
        if self._resumed is not None:
            # The restart hasn't come to this loader yet.
            return self._resumed
        position = self.cursor.position
        if not position.start:
            return None
        given = self._given
        if self._taken is None:
            state = self._holder.state_dict()
        else:
            given = self._taken()
            state = self._states[given - self._given - 1]
        ranks = dist.get_world_size()
        return {"epoch": position.epoch, "given": given, "ranks": ranks, "state": state}

    def _saved(self) -> dict[str, Any] | None:
        """What the checkpoint has that the attempt starts from."""
        if not self.cursor.next_start:
            return None
        saved = saved_place(self._name)
        if saved is None:
            return None
        if saved["ranks"] != dist.get_world_size():
            raise ValueError(
                f"{self._name}: the checkpoint was made in the middle of epoch {saved['epoch']} of "
                f"an iterable data set, by {saved['ranks']} workers, and there are "
                f"{dist.get_world_size()} now. Each worker's place is its own: nobody can tell "
                "which items are still to come. Resume with "
                f"ScalingConfig(num_workers={saved['ranks']}), or from a checkpoint that was made "
                "between two epochs."
            )
        return saved


class UnsplitPlace:
    """The place, on this rank, of a loader that isn't split.

    Ranks may have different ones: each prepares what it needs, and draws with its own seed.

    Args:
        name: its name in checkpoints.
        cursor: counts its epochs and their items.
    """

    def __init__(self, name: str, cursor: Cursor[DataPosition]) -> None:
        self._cursor = cursor
        _places()[name] = self

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        at = self._cursor.position
        ranks = dist.get_world_size()
        return {"epoch": at.epoch, "given": at.start, "ranks": ranks, "seed": at.plan.seed}


def resume_at_own_place(name: str, cursor: Cursor[DataPosition]) -> None:
    """Begin at this rank's place in the checkpoint, if as many ranks made that.

    Otherwise rank 0's place counts, which the manifest has.
    """
    saved = saved_place(name)
    if saved is None or saved["ranks"] != dist.get_world_size():
        return
    position = cursor.position
    plan = replace(position.plan, seed=saved.get("seed", position.plan.seed))
    position = replace(position, plan=plan)
    cursor.resume_at(position.moved(saved["epoch"], saved["given"]))


def saved_place(name: str) -> dict[str, Any] | None:
    """This rank's place of a loader in the checkpoint that the attempt starts from.

    A rank that wasn't there gets rank 0's.
    """
    directory = starting_checkpoint()
    if directory is None:
        return None
    files = [directory / file_of(rank) for rank in (dist.get_rank(), 0)]
    file = next((each for each in files if each.exists()), None)
    saved: dict[str, Any] | None = None if file is None else loaded(file).get(name)
    return saved


def states() -> dict[str, Any]:
    """This rank's places, by name: of iterable data sets if they are in the middle of an epoch."""
    by_name = {name: place.state() for name, place in _places().items()}
    return {name: state for name, state in by_name.items() if state is not None}


def file_of(rank: int) -> str:
    """The file of a rank's places in a checkpoint."""
    return f"loaders-{rank}.pt"


_of_context: tuple[Any, dict[str, StreamPlace | UnsplitPlace]] | None = None


def _places() -> dict[str, StreamPlace | UnsplitPlace]:
    """By name, those of this attempt."""
    global _of_context
    context = get_context()
    # In an inline run, several attempts share a process.
    if _of_context is None or _of_context[0] is not context:
        _of_context = context, {}
    return _of_context[1]
