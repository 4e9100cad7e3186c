"""The private names of Lightning that polytrain uses, each with the reason.

Only this module breaks if a newer version renames one.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRFinder

LoggedValues: Any = _ResultCollection
"""Collects and reduces a loop's logged values; there is no public hook."""

WrappingCheckpointIO: Any = _WrappingCheckpointIO
"""Base class of plugins that wrap another plugin, such as `AsyncCheckpointIO`."""


def forget_length(trainer: Any) -> None:
    """Have Lightning ask again for the length of an epoch; by default it asks once."""
    trainer.fit_loop._combined_loader = None


def set_splitting(trainer: Any, *, splits: bool) -> None:
    """Set whether Lightning adds samplers to loaders; its public argument can't change later."""
    trainer._accelerator_connector.use_distributed_sampler = splits


def steps_logged(trainer: Any) -> int:
    """Return the step that Lightning logs the next batch with; `global_step` counts differently."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_logged_values(loop: Any, values: Any) -> None:
    """Set the collection of a loop's logged values."""
    loop._results = values


def raise_failure(checkpoint_io: Any) -> None:
    """Raise the error of an `AsyncCheckpointIO`'s thread now, not only at the next save."""
    if checkpoint_io._error is not None:
        raise checkpoint_io._error


def starts_processes(strategy: Any) -> bool:
    """Whether a strategy starts processes of its own, also where others have started some."""
    return isinstance(strategy.launcher, _MultiProcessingLauncher)


def is_search_alone(finder: Any) -> bool:
    """Whether a finder is one of `Tuner`'s, which ends its `fit`."""
    return bool(finder._early_exit)


def found_rate(finder: Any, results: Any) -> Any:
    """Return a `LearningRateFinder`'s results as the object that its search returns."""
    found = _LRFinder(finder._mode, finder._min_lr, finder._max_lr, finder._num_training_steps)
    found.results = results
    return found


def sets_rate(finder: Any) -> bool:
    """Whether a `LearningRateFinder` sets an attribute of the module to its result."""
    return bool(finder._update_attr)


def rate_attribute(finder: Any, module: Any) -> str:
    """Return the name of the module's attribute that a `LearningRateFinder` sets."""
    name: str = _determine_lr_attr_name(module, finder._attr_name)
    return name


def size_attribute(finder: Any) -> str:
    """Return the name of the attribute that a `BatchSizeFinder` sets."""
    name: str = finder._batch_arg_name
    return name


def has_version(logger: Any) -> bool:
    """Whether the user has named a logger's version; the public property would create one."""
    return logger._version is not None


def set_version(logger: Any, version: str) -> None:
    """Name the version of an existing logger."""
    logger._version = version


def is_open(logger: Any) -> bool:
    """Whether a logger has opened its files; the public property would open them."""
    return logger._experiment is not None


def log_no_start(logger: Any) -> None:
    """Have a `TensorBoardLogger` skip the metric that it logs at each start, at step 0."""
    logger._default_hp_metric = False


def accumulates(trainer: Any) -> bool:
    """Whether no optimizer has used the gradients so far; only the loop knows the last batch."""
    return bool(trainer.fit_loop._should_accumulate())


def is_at_limit(trainer: Any) -> bool:
    """Whether a `fit` has reached its last epoch or step; `done` would also tell the user."""
    loop = trainer.fit_loop
    return bool(
        _is_max_limit_reached(trainer.global_step, loop.max_steps)
        or _is_max_limit_reached(loop.epoch_progress.current.processed, loop.max_epochs)
    )


def is_ending_batch(trainer: Any) -> bool:
    """Whether the hooks at a batch's end are called: what follows them is still to come."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready == batches.processed == batches.completed + 1)


def is_ending_epoch(trainer: Any) -> bool:
    """Whether the hooks at an epoch's end are called: what follows them is still to come."""
    epochs = trainer.fit_loop.epoch_progress.current
    return bool(epochs.processed == epochs.completed + 1)


def begin_next_epoch(trainer: Any, *, has_begun: bool) -> None:
    """Have a loop that was saved after an epoch's last batch take the next one's batches.

    From a hook at the start of an epoch, Lightning would take none of its batches. With `max_steps`
    it would end the last epoch again, after a batch of the next one.
    """
    loop = trainer.fit_loop
    if loop.epoch_loop._num_ready_batches_reached():
        loop.epoch_loop.restarting = False
        loop._restarting = loop._restarting and has_begun


@contextmanager
def ending_batch(trainer: Any) -> Iterator[None]:
    """Within a block that calls the hooks at a completed batch's end, count it as one that ends."""
    module, batches = trainer.lightning_module, trainer.fit_loop.epoch_loop.batch_progress
    for each in (batches.total, batches.current):
        each.completed -= 1
    module._current_fx_name = "on_train_batch_end"
    yield
    module._current_fx_name = None
    batches.increment_completed()


def complete_batch(trainer: Any) -> None:
    """Count a batch as completed, as Lightning does after the hooks at its end."""
    trainer.fit_loop.epoch_loop.batch_progress.increment_completed()


def whole_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return all that a checkpoint holds; the public method writes a file, with all ranks."""
    content: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return content


def current_hook(trainer: Any) -> str | None:
    """Return the name of the hook that Lightning is calling; None if there is none."""
    name: str | None = trainer.lightning_module._current_fx_name
    return name


def saved_last(callback: Any) -> dict[str, Any]:
    """Return what a `ModelCheckpoint` knows of its last save, which its state lacks."""
    return {
        "dirpath": callback.dirpath,
        "step": callback._last_global_step_saved,
        "path": callback._last_checkpoint_saved,
        "last": callback.last_model_path,
        "waits": callback._defer_save_until_validation,
    }


def set_saved_last(callback: Any, trainer: Any, saved: Mapping[str, Any]) -> None:
    """Restore what `saved_last` has returned. In another directory there are no such files.

    All ranks call this.
    """
    callback._last_global_step_saved = saved["step"]
    callback._defer_save_until_validation = saved["waits"]
    if callback.dirpath == saved["dirpath"]:
        callback._last_checkpoint_saved = saved["path"]
        last = saved.get("last")
        # A link is in no checkpoint of the run, and another machine lacks it.
        if last and callback.file_exists(last, trainer):
            callback.last_model_path = last


def count_as_saved(callback: Any, step: int, path: str, hook: str) -> None:
    """Have a `ModelCheckpoint` know of the file that it has just saved, which it does later.

    A validation that it has waited for is over in the hook in which it saves then.
    """
    callback._last_global_step_saved = step
    callback._last_checkpoint_saved = path
    if hook == "on_validation_end":
        callback._defer_save_until_validation = False


def save_last_model(callback: Any, trainer: Any) -> None:
    """Have a `ModelCheckpoint` save its last model now, and not again in the same step."""
    own, step = type(callback)._save_last_checkpoint, trainer.global_step

    def later(trainer: Any, candidates: Any) -> None:
        del callback._save_last_checkpoint
        if trainer.global_step != step:
            own(callback, trainer, candidates)

    own(callback, trainer, callback._monitor_candidates(trainer))
    callback._save_last_checkpoint = later


def forget_restart(trainer: Any) -> None:
    """Have a loop that has loaded its state continue as if it hadn't been restarted.

    A restarted one takes a batch's validation as done, and with `max_steps` each epoch as begun.
    """
    loop = trainer.fit_loop
    loop._restarting = loop.epoch_loop.restarting = False
    loop.reset_restart_stage()
    loop.epoch_loop.reset_restart_stage()


def end_as_any_epoch(trainer: Any) -> None:
    """Have a resumed epoch end as any other.

    Lightning wouldn't update schedulers that monitor a metric, as its checkpoints lack metrics.
    """
    trainer.fit_loop._restarting = False


def update_by_metrics(trainer: Any) -> None:
    """Update the schedulers that monitor a metric, as Lightning does after an epoch's hooks.

    It is called when the epoch counts as completed. A metric that only the module's last hook logs
    may be lacking: then none is updated.
    """
    batches, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    monitored = {
        each.monitor
        for each in trainer.lr_scheduler_configs
        if each.reduce_on_plateau and each.interval == "epoch"
    }
    if batches._num_ready_batches_reached() and monitored <= trainer.callback_metrics.keys():
        epochs.completed -= 1
        batches.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1


def end_of_batch(trainer: Any) -> None:
    """Log a batch's values, as Lightning does after the hooks at its end."""
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()


class Logged:
    """The values that a trainer has logged. Lightning's checkpoints lack them."""

    _SHOWN = (("callback", "_callback_metrics"), ("log", "_logged_metrics"))
    _OPTIONS = (
        *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
        "add_dataloader_idx",
    )
    """Lightning refuses a value whose options differ from those that it was logged with before."""

    _STATE = ("value", "cumulated_batch_size", "_forward_cache", "_update_count")
    """The last one changes also when 0 is added to a sum: then the others stay what they are."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._logger_connector
        self._results = trainer.fit_loop.epoch_loop._results

    @property
    def are_of_epochs(self) -> bool:
        """Whether any is a mean, or another reduction, over an epoch of the training."""
        return any(each.meta.on_epoch for each in self._results.values())

    def kept(self) -> dict[str, Any]:
        """Return all of them, as plain values.

        Raises:
            ValueError: one is no number, or averaged over other ranks than all.
        """
        connector = self._connector
        is_in_epoch = connector._first_loop_iter is not None
        newest = connector.metrics if is_in_epoch else {"callback": {}, "log": {}, "pbar": {}}
        return {
            **self._shown(newest),
            "is_first": connector._first_loop_iter,
            "function": connector._current_fx,
            "results": {key: self._kept_result(key, each) for key, each in self._results.items()}
            if is_in_epoch
            else {},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue what `kept` has returned."""
        connector = self._connector
        self.show(kept)
        connector._first_loop_iter, connector._current_fx = kept["is_first"], kept["function"]
        for key, saved in kept["results"].items():
            self._results[key] = self._result(saved)

    def shown(self) -> dict[str, Any]:
        """Return the newest values that callbacks and loggers see, as plain values.

        All ranks call this: an epoch's values are averaged over them.
        """
        return self._shown(self._connector.metrics)

    def show(self, shown: Mapping[str, Any]) -> None:
        """Have callbacks and loggers see what `shown` has returned."""
        connector = self._connector
        for kind, attribute in self._SHOWN:
            setattr(connector, attribute, {n: _tensor(each) for n, each in shown[kind].items()})
        connector._progress_bar_metrics = dict(shown["bar"])

    def sums(self) -> dict[str, Any]:
        """Return what the epoch's means are made of, as plain values; metrics aren't among it."""
        return {
            key: self._kept_result(key, each)
            for key, each in self._results.items()
            if each.is_tensor and each.meta.sync.group is None
        }

    def restore_sums(self, sums: Mapping[str, Any]) -> None:
        """Continue the means over an epoch that `sums` has returned."""
        if sums:
            # Otherwise the next value that is logged would be the epoch's first.
            self._connector._first_loop_iter = False
        for key, saved in sums.items():
            self._results[key] = self._result(saved)

    def _shown(self, newest: Mapping[str, Any]) -> dict[str, Any]:
        connector = self._connector
        return {
            **{
                kind: {
                    name: _number(value)
                    for name, value in {**getattr(connector, attribute), **newest[kind]}.items()
                }
                for kind, attribute in self._SHOWN
            },
            "bar": {**connector._progress_bar_metrics, **newest["pbar"]},
        }

    def _kept_result(self, key: str, result: Any) -> dict[str, Any]:
        meta = result.meta
        if not result.is_tensor:
            raise ValueError(f"it logs {key!r}, which is a metric")
        if meta.sync.group is not None:
            raise ValueError(f"it averages {key!r} over a group of its own")
        return {
            "options": {name: getattr(meta, name) for name in self._OPTIONS},
            "reduction": meta.reduce_fx.__name__,
            "is_builtin": meta.reduce_fx in (max, min, sum),
            "is_averaged": meta.sync.should,
            "is_of_rank_zero": meta.sync.rank_zero_only,
            # One value, since a lost rank's sum and its count can't be of two times.
            "state": tuple(
                (name, _number(getattr(result, name)))
                for name in self._STATE
                if getattr(result, name, None) is not None
            ),
            "is_reset": result.has_reset,
        }

    def _result(self, saved: Mapping[str, Any]) -> Any:
        reduction = getattr(builtins if saved["is_builtin"] else torch, saved["reduction"])
        meta = _Metadata(**saved["options"], reduce_fx=reduction)
        meta.sync = _Sync(
            _should=saved["is_averaged"],
            fn=self._trainer.strategy.reduce,
            rank_zero_only=saved["is_of_rank_zero"],
        )
        result = _ResultMetric(meta, is_tensor=True)
        for name, value in saved["state"]:
            setattr(result, name, _tensor(value))
        result.has_reset = saved["is_reset"]
        return result


def _number(value: Any) -> tuple[float, str]:
    if not isinstance(value, torch.Tensor):
        return value, ""
    return value.item(), str(value.dtype).removeprefix("torch.")


def _tensor(kept: tuple[float, str]) -> Any:
    value, dtype = kept
    return torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
