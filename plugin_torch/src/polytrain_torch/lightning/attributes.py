"""Which trainers' states are whole: what users' modules and callbacks carry beside them isn't."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polytrain_torch.libraries import needed
from polytrain_torch.survivors.snapshots import Snapshot

if TYPE_CHECKING:
    from polytrain_torch.lightning.trainer import Trainer

with needed("lightning"):
    from lightning.fabric.plugins.io import TorchCheckpointIO
    from lightning.pytorch import LightningDataModule, LightningModule, callbacks
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from polytrain_torch.lightning.callbacks import saves_config
    from polytrain_torch.lightning.loaders import CountingLoader, PlacedLoader
    from polytrain_torch.lightning.private import WrappingCheckpointIO

_STATEFUL: dict[type, frozenset[str]] = {
    callbacks.EarlyStopping: frozenset(vars(callbacks.EarlyStopping(""))),
    callbacks.ModelCheckpoint: frozenset(vars(callbacks.ModelCheckpoint())),
    callbacks.OnExceptionCheckpoint: frozenset(),
    callbacks.Timer: frozenset(vars(callbacks.Timer())),
    callbacks.GradientAccumulationScheduler: frozenset(),
    callbacks.LearningRateFinder: frozenset(vars(callbacks.LearningRateFinder())),
    callbacks.BatchSizeFinder: frozenset(vars(callbacks.BatchSizeFinder())),
}
"""Lightning's callbacks whose state a restart restores: the names of their own attributes."""

_SHOWING = (
    callbacks.DeviceStatsMonitor,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.BasePredictionWriter,
)
"""Lightning's callbacks that have nothing to keep."""

_OURS = ("polytrain_torch", "lightning")
_PART = frozenset(vars(torch.nn.Module()))
_MODULE = frozenset((*vars(LightningModule()), "forward"))
"""Names of attributes that are Lightning's own. It replaces `forward` while DDP calls it."""

_DATA = frozenset(vars(LightningDataModule()))


def unsuitable(trainer: Trainer, *, fit: int, loaders: Sequence[PlacedLoader]) -> str | None:
    """Return why the state of a trainer isn't kept; None if it is.

    Args:
        fit: number of its call of `fit`.
        loaders: the loaders of the training whose places checkpoints have.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    if fit != 1:
        return "it isn't the first call of fit()"
    if type(strategy) not in (DDPStrategy, SingleDeviceStrategy):
        return "its model isn't trained with DDP"
    if not module.automatic_optimization:
        return "it optimizes manually"
    if len(trainer.optimizers) != 1:
        return "it has no optimizer"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "it scales its gradients"
    if len(loaders) != 1 or not isinstance(loaders[0], CountingLoader):
        return "a restart can't continue its data loader within an epoch"
    if trainer.fast_dev_run:
        return "it is a fast_dev_run"
    if trainer.val_check_batch is None:
        return "time decides when it validates"
    if trainer.reload_dataloaders_every_n_epochs > 1:
        return "it reloads its data loaders after several epochs"
    if type(_innermost(strategy.checkpoint_io)) is not TorchCheckpointIO:
        return "a plugin of its own saves its checkpoints"
    return _unsuitable_hooks(trainer) or _unsuitable_callback(trainer.callbacks)


class Attributes:
    """What a module, its data and callbacks have when training begins, beside their states."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        self._known = [
            trainer,
            trainer.strategy,
            *trainer.loggers,
            *trainer.callbacks,
            *trainer.optimizers,
            *(each.scheduler for each in trainer.lr_scheduler_configs),
            *module.modules(),
            *module.parameters(),
            *_saved_buffers(module),
        ]
        self._first = self._taken()

    def carried(self) -> str | None:
        """Return what has changed since, and a restart wouldn't find; None if nothing."""
        snapshot, now = self._taken()
        before, first = self._first
        for name in sorted(first.keys() | now.keys()):
            if (
                name not in first
                or name not in now
                or not before.equals(first[name], snapshot, now[name])
            ):
                return f"{name} changes from step to step, and isn't in its checkpoints"
        return None

    def _taken(self) -> tuple[Snapshot, dict[str, Any]]:
        snapshot = Snapshot(self._known, ())
        references = {name: snapshot.add(value) for name, value in _values(self._trainer)}
        snapshot.take()
        return snapshot, references


def _values(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield names and values of attributes that aren't in a checkpoint."""
    root = trainer.lightning_module
    for name, module in root.named_modules():
        if type(module).__module__.partition(".")[0] in ("torch", *_OURS):
            continue
        left_out = _MODULE if isinstance(module, LightningModule) else _PART
        label = ".".join(filter(None, (type(root).__name__, name)))
        for attribute, value in vars(module).items():
            if attribute not in left_out:
                yield f"{label}.{attribute}", value
    saved = {id(each) for each in _saved_buffers(root)}
    for name, buffer in root.named_buffers():
        if id(buffer) not in saved:
            yield f"the buffer {name}, which isn't persistent,", buffer
    data = trainer.datamodule
    if data is not None and not is_overridden("state_dict", data):
        for attribute, value in vars(data).items():
            if attribute not in _DATA:
                yield f"{type(data).__name__}.{attribute}", value
    for number, each in enumerate(trainer.callbacks):
        if _is_library(each) or _shows(each) or _has_own_state(each):
            continue
        own: Iterable[str] = next(
            (names for base, names in _STATEFUL.items() if isinstance(each, base)), ()
        )
        for attribute, value in vars(each).items():
            if attribute not in own:
                yield f"{type(each).__name__}.{attribute} (callback {number})", value


def _unsuitable_hooks(trainer: Trainer) -> str | None:
    for each in (trainer.lightning_module, trainer.datamodule, *trainer.callbacks):
        if each is None or _is_library(each):
            continue
        if is_overridden("on_save_checkpoint", each):
            return f"{type(each).__name__}.on_save_checkpoint adds to its checkpoints"
    return None


def _unsuitable_callback(given: list[Any]) -> str | None:
    for each in given:
        if isinstance(each, tuple(_STATEFUL)) or _shows(each):
            if isinstance(each, callbacks.Checkpoint) and not _is_library(each):
                return f"{type(each).__name__} saves checkpoints of its own"
            continue
        inherited = [base for base in type(each).__mro__ if _of_library(base)]
        own = [base for base in inherited if base not in (Callback, callbacks.LambdaCallback)]
        if any(base.__module__.startswith("lightning.") for base in own):
            return f"the state of {type(each).__name__} isn't whole in its checkpoints"
    return None


def _saved_buffers(module: Any) -> list[torch.Tensor]:
    state = module.state_dict()
    return [each for name, each in module.named_buffers(remove_duplicate=False) if name in state]


def _innermost(checkpoint_io: Any) -> Any:
    while isinstance(checkpoint_io, WrappingCheckpointIO):
        checkpoint_io = checkpoint_io.checkpoint_io
    return checkpoint_io


def _shows(callback: Any) -> bool:
    return isinstance(callback, _SHOWING) or saves_config(callback)


def _is_library(each: Any) -> bool:
    return _of_library(type(each)) and type(each) is not callbacks.LambdaCallback


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OURS


def _has_own_state(callback: Any) -> bool:
    """Whether a user's callback says what its state is."""
    defined = next(base for base in type(callback).__mro__ if "state_dict" in vars(base))
    return not _of_library(defined)
