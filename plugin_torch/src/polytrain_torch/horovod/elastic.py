"""Elastic training: `TorchState`, `run` and `ElasticSampler`.

In Horovod a commit is a copy in memory, from which the surviving processes continue. Here it is a
checkpoint of the run: all processes of an attempt end, and new ones resume from the newest one.
"""

from __future__ import annotations

import copy
import functools
import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from polytrain import checkpoint_requested, get_checkpoint
from polytrain_torch.checkpoints.sharded_parts import State
from polytrain_torch.checkpoints.training_state import TrainingState
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.horovod.basics import rank, size
from polytrain_torch.horovod.objects import broadcast_object, broadcast_parameters
from polytrain_torch.horovod.reductions import Max, allreduce

__all__ = ["ElasticSampler", "TorchState", "run"]


class TorchState:
    """Objects and values of a script that a restart restores. All ranks make the same calls.

    Args:
        model: a module.
        optimizer: its optimizer, distributed or not.
        others: more objects with `state_dict` and `load_state_dict` (schedulers, samplers), and
            plain values, such as the epoch. All of them become attributes of the state.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **others}
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._state: TrainingState | None = None
        """The state of the last commit, whose first one is read back."""

        self._parts = [name for name, value in given.items() if _has_state(value)]
        self._values = [name for name in given if name not in self._parts]
        for name, value in given.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have `run` call these after it resumes from a commit, before it calls `sync`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the callbacks of `register_reset_callbacks`."""
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Commit the state as a checkpoint of the run. A restart resumes from it.

        It is stored in the background, also if a rank is lost once this has returned. Numbers among
        the values are reported as metrics. If the run waits for a checkpoint, to stop or to change
        its workers, the process ends here.

        Raises:
            TypeError: a value isn't plain data, and couldn't be loaded safely.
        """
        self.save()
        values = {name: getattr(self, name) for name in self._values}
        metrics = {name: value for name, value in values.items() if _is_number(value)}
        self._training_state().report(metrics, **values)
        # Here the commit would end while rank 0 still writes its files.
        agree_on_call("TorchState.commit")
        dist.barrier()

    def check_host_updates(self) -> None:
        """Commit if the run waits for a checkpoint, to stop or to change its workers."""
        if allreduce(torch.tensor(int(checkpoint_requested())), op=Max).item():
            self.commit()

    def save(self) -> None:
        """Copy the state in memory, for `restore`."""
        self._saved_parts = {
            name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._parts
        }
        self._saved_values = {name: copy.deepcopy(getattr(self, name)) for name in self._values}

    def restore(self) -> None:
        """Restore the copy that the last `save`, `commit` or `sync` made."""
        for name, state in self._saved_parts.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        for name, value in self._saved_values.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Replace every rank's state by rank 0's."""
        for name in self._parts:
            part = getattr(self, name)
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            else:
                part.load_state_dict(broadcast_object(part.state_dict(), root_rank=0))
        values = {name: getattr(self, name) for name in self._values}
        for name, value in broadcast_object(values, root_rank=0).items():
            setattr(self, name, value)
        self.save()

    def resume(self) -> bool:
        """Load the newest commit of the run; return whether there is one."""
        if get_checkpoint() is None:
            return False
        for name, value in self._training_state().restore().items():
            setattr(self, name, value)
        self.save()
        return True

    def _training_state(self) -> TrainingState:
        parts = {name: getattr(self, name) for name in self._parts}
        # The script may have replaced some.
        if self._state is None or any(self._state.parts[n] is not parts[n] for n in parts):
            self._state = _StateOfRank0(**parts)
        return self._state


class _StateOfRank0(TrainingState):
    """A training state that doesn't compare ranks: `sync` gives all of them rank 0's state."""

    _compares_ranks = False

    def _keep(self, progress: State) -> None:
        """Keep no steps between two commits: only a commit saves the attributes."""


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have an elastic training function resume from the newest commit.

    The function gets the state as first argument. Before the call, the state is loaded from the
    run's newest commit, if there is one, and made equal on all ranks.
    """

    @functools.wraps(function)
    def resumed(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        if state.resume():
            state.on_reset()
        state.sync()
        return function(state, *args, **kwargs)

    return resumed


class ElasticSampler(Sampler[int]):
    """Divides the items that an epoch hasn't processed yet among the ranks.

    Pass it to `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of
    each epoch. If the items can't be divided evenly, the first ones are repeated.

    Args:
        dataset: a data set whose length doesn't change.
        shuffle: draw a new order for each epoch.
        seed: seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call this at the end of the previous epoch."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count one batch of this size on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of items that all ranks have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining items of the epoch among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = [*range(len(self.dataset))]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # There may be fewer items than ranks.
        padded = islice(cycle(self.remaining_indices), self.total_size)
        return islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
