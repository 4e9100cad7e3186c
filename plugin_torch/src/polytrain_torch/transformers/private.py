"""The private names of Transformers' and TRL's trainers that polytrain uses, each with the reason.

Only this module breaks if a newer version renames one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.private import uncompiled


def replace_end_of_step(trainer: Any, make: Callable[[Any], Any]) -> Callable[..., None]:
    """Replace the method that a Transformers trainer calls at the end of each step and epoch.

    `make` gets it, and returns its replacement, which is returned. No callback that may stop
    training runs after it.
    """
    trainer._maybe_log_save_evaluate = end = make(trainer._maybe_log_save_evaluate)
    return end


def replace_loading_random(trainer: Any, load: Callable[[Any, str | None], None]) -> Any:
    """Replace the method by which a Transformers trainer restores random states; return its own.

    It calls it at the first step after a restart. `load` gets its own and the directory.
    """
    own = trainer._load_rng_state
    trainer._load_rng_state = partial(load, own)
    return own


def replace_starting_place(
    trainer: Any, place: Callable[[tuple[int, int]], tuple[int, int]]
) -> None:
    """Replace how a Transformers trainer finds the epoch, and the batches of it, to begin with.

    It divides the number of steps by those of an epoch. `place` gets what it finds, after it has
    loaded its state.
    """
    own = trainer._init_training_state
    trainer._init_training_state = lambda *args: place(own(*args))


def prepare_anew(trainer: Any) -> None:
    """Have Accelerate wrap a model in DDP that `evaluate` or `predict` has prepared without it.

    It takes such a model as it is, and then each rank would train by its own gradients alone.
    """
    is_in_ddp = isinstance(uncompiled(trainer.model_wrapped), DistributedDataParallel)
    if not is_in_ddp and vars(trainer.model).pop("_is_accelerate_prepared", False):
        # Takes back what mixed precision has made of its forward.
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        trainer.model_wrapped = trainer.model


SECONDS = "seconds"
"""Name of the time among what `LogSums` keeps: each rank has its own."""


class LogSums:
    """What a Transformers trainer, or one of TRL's, adds up for its logs, and its time.

    Its checkpoints lack it: without it, logs after a restart would be of the steps since.
    """

    _NAMES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
    """Transformers 5.5 lacks the last one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics: dict[tuple[str, str], _Values] = {}
        self._seconds = 0.0
        """Seconds of training before this attempt, up to the checkpoint that it resumes from."""

        self._began = time.monotonic()
        own = trainer._finalize_training
        trainer._finalize_training = lambda trial, rows, began: own(
            trial, rows, began - self._seconds
        )

    def begin(self) -> None:
        """Note that a call of `train()` begins."""
        self._seconds, self._began = 0.0, time.monotonic()

    @property
    def loss(self) -> torch.Tensor:
        """This rank's sum of losses since the last log, which the trainer changes in place."""
        return self._trainer._tr_loss

    def kept(self, more: torch.Tensor | None = None) -> dict[str, Any]:
        """Return all of them, and at which steps they were logged or began, by their names.

        `more` is a loss that is about to be added.
        """
        names = (name for name in self._NAMES if hasattr(self._trainer, name))
        own = {name: float(getattr(self._trainer, name)) for name in names}
        own[SECONDS] = self._seconds + time.monotonic() - self._began
        if more is not None:
            own["_tr_loss"] = float(self.loss + more)
        return {**own, **self._of_trl()}

    def as_json(self) -> dict[str, Any]:
        """Return what `kept` returns, with lists for bytes."""
        kept = self.kept()
        by_mode = kept.get("_metrics", {})
        plain = {
            mode: {name: _Values.unpacked(each) for name, each in metrics.items()}
            for mode, metrics in by_mode.items()
        }
        return {**kept, "_metrics": plain} if by_mode else kept

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue what `kept` or `as_json` has returned."""
        trainer, self._seconds = self._trainer, kept.get(SECONDS, 0.0)
        for name in self._NAMES:
            if name not in kept or not hasattr(trainer, name):
                continue
            own = getattr(trainer, name)
            if isinstance(own, torch.Tensor):
                own.fill_(kept[name])
            else:
                setattr(trainer, name, type(own)(kept[name]))
        if "_metrics" not in kept or not self._of_trl():
            return
        trainer._total_train_tokens = kept["_total_train_tokens"]
        for mode, metrics in kept["_metrics"].items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(
                {name: _Values.unpacked(each) for name, each in metrics.items()}
            )

    def _of_trl(self) -> dict[str, Any]:
        """Return the values of each metric since the last log, and the tokens since the first."""
        tokens = getattr(self._trainer, "_total_train_tokens", None)
        if not isinstance(tokens, int | float):
            return {}
        metrics: dict[str, dict[str, bytes | list[Any]]] = {}
        for mode, by_name in self._trainer._metrics.items():
            metrics[mode] = {}
            for name, values in by_name.items():
                seen = self._metrics.get((mode, name))
                if seen is None or not seen.are_still(values):
                    seen = self._metrics[mode, name] = _Values(values)
                if (packed := seen.packed()) is not None:
                    metrics[mode][name] = packed
        return {"_metrics": metrics, "_total_train_tokens": tokens}


class _Values:
    """A list of values that grows in each step: only the new ones are looked at."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._floats = array("d")

    def are_still(self, values: list[Any]) -> bool:
        """Return whether this is the list, with more values at most."""
        return values is self._values and len(values) >= len(self._floats)

    def packed(self) -> bytes | list[Any] | None:
        """Return the values, as bytes if all are floats; None if one isn't a number."""
        new = self._values[len(self._floats) :]
        if {float}.issuperset(map(type, new)):
            self._floats.extend(new)
            return self._floats.tobytes()
        return [*self._values] if all(map(_is_number, new)) else None

    @staticmethod
    def unpacked(values: bytes | list[Any]) -> list[Any]:
        """Return the values of `packed` as a list."""
        return array("d", values).tolist() if isinstance(values, bytes) else [*values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def write_events(callback: Any, arguments: Any) -> None:
    """Have Transformers' `TensorBoardCallback` open its writer earlier than it does by itself."""
    callback._init_summary_writer(arguments)
