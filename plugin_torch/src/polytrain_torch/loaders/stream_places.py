"""Per-rank places of loaders in checkpoints.

Loaders of iterable data sets have a state of each rank in the middle of an epoch. Loaders that
aren't split have a position of each rank, and one rank alone may prepare them. Samplers that change
in each epoch have the first one, on the ranks that draw.
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
from polytrain_torch.loaders.users_samplers import Passes

logger = logging.getLogger(__name__)


class StreamPlace:
    """The place of a loader of an iterable data set, on this rank.

    Args:
        name: its name in checkpoints.
        cursor: counts its epochs and their batches.
        holder: the object with `state_dict` and `load_state_dict`: the loader or its data set.
        seed: seed of the loader's worker processes.
        taken: returns how many batches of the epoch the training function has got. By default it is
            the number that the loader has yielded; with a library it may be one less.

    Raises:
        ValueError: another number of ranks saved the place.
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
        """The holder's states after the last two batches."""

        self._resumed = self._saved()
        _places()[name] = self

    def begin(self, epoch: Epoch) -> None:
        """Use this epoch in the next iteration, and load the saved state if it resumes."""
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
        """Count a batch that is about to be yielded."""
        self._given += 1
        if self._taken is not None:
            self._states = [*self._states[-1:], copy.deepcopy(self._holder.state_dict())]
        epoch.given(self._given)

    def state(self) -> dict[str, Any] | None:
        """Return the place to store in a checkpoint; None between two epochs."""
        if self._resumed is not None:
            # Since the restart, this loader hasn't been iterated over.
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
        """Return the place in the attempt's starting checkpoint; None if there is none."""
        if not self.cursor.next_epoch().start:
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
    """The place of a loader that isn't split, on this rank.

    Ranks may have different loaders: each prepares its own, and draws with its own seed.
    """

    def __init__(self, name: str, cursor: Cursor[DataPosition]) -> None:
        self._cursor = cursor
        _places()[name] = self

    def state(self) -> dict[str, Any]:
        """Return the place to store in a checkpoint."""
        at = self._cursor.position
        ranks = dist.get_world_size()
        return {"epoch": at.epoch, "given": at.start, "ranks": ranks, "seed": at.plan.seed}


class SamplerPlace:
    """The first epoch of a sampler that changes in each: a restart draws again from there on."""

    def __init__(self, name: str, passes: Passes) -> None:
        """
        Args:
            name: the loader's name in checkpoints.
            passes: the passes over its sampler, which get the first epoch after a restart.
        """
        name = f"sampler of {name}"
        self._passes = passes
        # A loader that is prepared again may have another sampler, which has no earlier epochs.
        if name not in _places() and (saved := saved_place(name)) is not None:
            passes.first = saved["first"]
        _places()[name] = self

    def state(self) -> dict[str, Any] | None:
        """Return what to store in a checkpoint; None if the sampler doesn't change."""
        return None if self._passes.first is None else {"first": self._passes.first}


def resume_at_own_place(name: str, cursor: Cursor[DataPosition]) -> None:
    """Move a cursor to this rank's place in the checkpoint, if as many ranks saved it.

    Otherwise the cursor stays at rank 0's place, from the checkpoint's manifest.
    """
    saved = saved_place(name)
    if saved is None or saved["ranks"] != dist.get_world_size():
        return
    position = cursor.position
    plan = replace(position.plan, seed=saved.get("seed", position.plan.seed))
    position = replace(position, plan=plan)
    cursor.resume_at(position.moved(saved["epoch"], saved["given"]))


def saved_place(name: str) -> dict[str, Any] | None:
    """Return a loader's place on this rank, from the attempt's starting checkpoint.

    A new rank gets rank 0's. Return None if there is none.
    """
    directory = starting_checkpoint()
    if directory is None:
        return None
    files = [directory / file_of(rank) for rank in (dist.get_rank(), 0)]
    file = next((each for each in files if each.exists()), None)
    saved: dict[str, Any] | None = None if file is None else loaded(file).get(name)
    return saved


def states() -> dict[str, Any]:
    """Return this rank's places by name; iterable data sets only in the middle of an epoch."""
    return {
        name: state for name, place in _places().items() if (state := place.state()) is not None
    }


def file_of(rank: int) -> str:
    """Return the name of the file with a rank's places in a checkpoint."""
    return f"loaders-{rank}.pt"


_of_context: tuple[Any, dict[str, StreamPlace | UnsplitPlace | SamplerPlace]] | None = None


def _places() -> dict[str, StreamPlace | UnsplitPlace | SamplerPlace]:
    """Return this attempt's places, by name."""
    global _of_context
    context = get_context()
    # In an inline run, several attempts share a process.
    if _of_context is None or _of_context[0] is not context:
        _of_context = context, {}
    return _of_context[1]
