"""The private names of Lightning that polytrain uses, each with the reason.

What a newer version may rename stands here alone.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRFinder

LoggedValues: Any = _ResultCollection
"""What a loop keeps of logged values, and where it reduces them; there is no public hook."""

WrappingCheckpointIO: Any = _WrappingCheckpointIO
"""The base class of plugins that hold another plugin, such as `AsyncCheckpointIO`."""


def forget_length(trainer: Any) -> None:
    """Let Lightning ask again for the length of an epoch, which it asks once."""
    trainer.fit_loop._combined_loader = None


def set_splitting(trainer: Any, *, splits: bool) -> None:
    """Set whether Lightning gives loaders samplers of its own; its argument is for all of them."""
    trainer._accelerator_connector.use_distributed_sampler = splits


def steps_logged(trainer: Any) -> int:
    """Return the number under which Lightning logs the next batch; `global_step` counts others."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_logged_values(loop: Any, values: Any) -> None:
    """Set where a loop keeps its logged values."""
    loop._results = values


def raise_failure(checkpoint_io: Any) -> None:
    """Raise the error of an `AsyncCheckpointIO`'s thread, which it raises at the next save only."""
    if checkpoint_io._error is not None:
        raise checkpoint_io._error


def is_search_alone(finder: Any) -> bool:
    """Return whether a finder is one of `Tuner`'s, which ends its `fit`."""
    return bool(finder._early_exit)


def found_rate(finder: Any, results: Any) -> Any:
    """Return the result of a `LearningRateFinder` as the object that its search would make."""
    found = _LRFinder(finder._mode, finder._min_lr, finder._max_lr, finder._num_training_steps)
    found.results = results
    return found


def sets_rate(finder: Any) -> bool:
    """Return whether a `LearningRateFinder` sets an attribute of the module to its result."""
    return bool(finder._update_attr)


def rate_attribute(finder: Any, module: Any) -> str:
    """Return the attribute of a module that a `LearningRateFinder` sets."""
    name: str = _determine_lr_attr_name(module, finder._attr_name)
    return name


def size_attribute(finder: Any) -> str:
    """Return the attribute of a module that a `BatchSizeFinder` sets."""
    name: str = finder._batch_arg_name
    return name


def has_version(logger: Any) -> bool:
    """Return whether the user has named a logger's version; its public name makes one."""
    return logger._version is not None


def set_version(logger: Any, version: str) -> None:
    """Name the version of a logger that is made already."""
    logger._version = version


def is_open(logger: Any) -> bool:
    """Return whether a logger has opened its files; its public name opens them."""
    return logger._experiment is not None


def log_no_start(logger: Any) -> None:
    """Have a `TensorBoardLogger` not log again what it logs at each start, at step 0."""
    logger._default_hp_metric = False
