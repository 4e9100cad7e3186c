"""The private names of Lightning that polytrain uses, each with the reason.

Only this module breaks if a newer version renames one.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
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
