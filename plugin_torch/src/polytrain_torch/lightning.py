"""PyTorch Lightning in a training function: a `Trainer` that finds its workers and its checkpoint.

    from polytrain_torch.lightning import Trainer

in the place of `from lightning import Trainer` is all that a script needs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from polytrain import get_checkpoint, get_context, report
from polytrain_torch.call_counter import Calls
from polytrain_torch.checkpoint_parts import checkpoint_of, part_of
from polytrain_torch.data import PreparedDataLoader, sharded
from polytrain_torch.engine import current_device
from polytrain_torch.libraries import needed
from polytrain_torch.node_group import gradient_group
from polytrain_torch.randomness import restore_random_states, save_random_states

with needed("lightning"):
    import lightning
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.callbacks import Callback, ProgressBar
    from lightning.pytorch.strategies import DDPStrategy

logger = logging.getLogger(__name__)

_CHECKPOINT = "lightning.ckpt"
_FIT_FILE = "fit"

_fits = Calls("fit()")


class Trainer(lightning.Trainer):
    """Lightning's trainer, with its arguments, for the workers of a run.

    Whatever is saved while it fits, by `ModelCheckpoint` (Lightning has one by default, which saves
    after each epoch) or by `save_checkpoint`, is a checkpoint of the run, with the metrics that
    have been logged; those of an epoch without one are reported alone. `fit` resumes from the run's
    checkpoint, in the middle of an epoch too. Data loaders are split as by `prepare_data_loader`.

    Args:
        options: of `lightning.Trainer`. How many workers there are, with one device each, is for
            the run to say.

    Raises:
        ValueError: for another number of devices or nodes.
    """

    def __init__(self, **options: Any) -> None:
        for name in ("devices", "num_nodes"):
            if options.pop(name, "auto") not in ("auto", -1, 1):
                raise ValueError(
                    f"{name}: the run says how many workers there are, each with one device. Leave "
                    "it out, and use ScalingConfig(num_workers=…)."
                )
        workers, device = dist.get_world_size(), current_device()
        callbacks = _listed(options.pop("callbacks", None))
        defaults = {
            "accelerator": "gpu" if device.type == "cuda" else "cpu",
            # The run has a line of its own, and workers' output comes line by line.
            "enable_progress_bar": any(isinstance(each, ProgressBar) for each in callbacks),
        }
        self._loaders: list[_Loader] = []
        """Training's."""
        self._is_between = False
        self._reports = _Reports()
        if workers > 1 and options.get("strategy", "auto") in ("auto", "ddp"):
            options["strategy"] = DDPStrategy(process_group=gradient_group(device))
        own: dict[str, Any] = {
            "devices": [device.index] if device.type == "cuda" else 1,
            "num_nodes": workers,
            "use_distributed_sampler": False,
            "plugins": [*_listed(options.pop("plugins", None)), WorkerEnvironment()],
            "callbacks": [self._reports, *callbacks],
        }
        super().__init__(**{**defaults, **options, **own})
        self.strategy.process_dataloader = self._split

    @property
    def local_rank(self) -> int:
        """This worker's number on its node. The first of each node prepares the data."""
        return get_context().get_local_rank()

    def fit(self, *args: Any, **options: Any) -> None:
        """As Lightning's. From the run's checkpoint, if it has one, and else from `ckpt_path`.

        Of several in a training function, each resumes from its own.

        Raises:
            TypeError: for a module of the package pytorch_lightning.
            ValueError: if the checkpoint is a later one's: what this one has trained isn't kept.
        """
        _refuse_other_package(*args, *options.values())
        number = self._reports.fit = _fits.next()
        checkpoint = _checkpoint_of(number)
        if checkpoint is not None:
            options["ckpt_path"] = str(checkpoint / _CHECKPOINT)
        self._reports.loads_anything = options.get("weights_only") is False
        super().fit(*args, **options)

    def save_checkpoint(self, filepath: Any, weights_only: Any = None, **options: Any) -> None:
        """As Lightning's; while it fits, the run's checkpoint is the same."""
        super().save_checkpoint(filepath, weights_only, **options)
        # Outside of training others save for themselves, such as who looks for a learning rate.
        if not self._reports.is_training:
            return
        if weights_only:
            _tell_of_weights()
            return
        is_end = self.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_end:
            for loader in self._loaders:
                loader.end_epoch()
        elif len(self._loaders) > 1:
            _tell_of_several_loaders()
            return
        self._reports.saved(self, Path(filepath))

    def end_epoch(self) -> None:
        """Loaders that are asked for from now on take the places of those that there are."""
        if any(loader.was_resized for loader in self._loaders):
            # Lightning asks once how long an epoch is, and the one that is over was another's.
            self.fit_loop._combined_loader = None
        self._is_between = True

    def predict(self, *args: Any, **options: Any) -> Any:
        """As Lightning's: of every row once, by the rank that has it."""
        # Its own samplers know which rows a batch has, and repeat none to come out even.
        self._accelerator_connector.use_distributed_sampler = True
        try:
            return super().predict(*args, **options)
        finally:
            self._accelerator_connector.use_distributed_sampler = False

    def _split(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader):
            return loader
        if isinstance(loader.dataset, IterableDataset):
            return sharded(loader, device=None)
        if self.predicting:
            return loader
        if not self.training:
            return sharded(loader, device=None, keeps_place=False)
        if self._is_between:
            self._loaders, self._is_between = [], False
        name = f"data loader {len(self._loaders)} of Lightning's fit {self._reports.fit}"
        split = sharded(loader, device=None, name=name)
        if not split.has_place:
            return split
        self._loaders.append(_Loader(split, self))
        return self._loaders[-1]


class WorkerEnvironment(ClusterEnvironment):  # type: ignore[misc]  # Lightning's types aren't looked at
    """Every worker as a node with one device."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()


class _Reports(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self._saved_step = self._reported_step = -1
        self._is_checked = False
        self.is_training = False
        self.fit = 0
        """Its number in the training function."""
        self.loads_anything = False
        """Whether the user trusts checkpoints that hold more than plain data."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.is_training = True
        self._saved_step = self._reported_step = -1
        # Not earlier: a trial of the validation draws too.
        checkpoint = _checkpoint_of(self.fit)
        if checkpoint is not None:
            restore_random_states(checkpoint)
            self._saved_step = self._reported_step = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._tell(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.end_epoch()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._tell(trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.is_training = False

    def saved(self, trainer: Any, saved: Path) -> None:
        """Report a checkpoint, if it is the first after its step."""
        if self._saved_step == trainer.global_step:
            return
        self._saved_step = self._reported_step = trainer.global_step
        if not self._is_checked and not self.loads_anything:
            _refuse_unsafe(saved)
            self._is_checked = True
        with part_of(saved, name=_CHECKPOINT) as part:
            save_random_states(part)
            if part is not None and dist.get_rank() == 0:
                (part / _FIT_FILE).write_text(str(self.fit))
            report(_metrics(trainer), checkpoint_of(part))

    def _tell(self, trainer: Any) -> None:
        """Report the epoch that is over, unless there was a checkpoint at its end."""
        if self._reported_step != trainer.global_step > 0:
            self._reported_step = trainer.global_step
            report(_metrics(trainer))


class _Loader:
    """A loader as Lightning sees it, which counts the batches of an epoch from its start."""

    def __init__(self, loader: PreparedDataLoader, trainer: Trainer) -> None:
        self._loader = loader
        done = 0
        if loader.is_under_way:
            # With as many workers as there were then.
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._length = done + loader.batches_left()

    def __len__(self) -> int:
        return self._length

    @property
    def was_resized(self) -> bool:
        """Whether its first epoch has another length than those that follow."""
        return self._length != len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: its place is in the run's checkpoint. But Lightning asks whether it has one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


def _refuse_other_package(*given: Any) -> None:
    """Refuse what is of the package `pytorch_lightning`, whose classes aren't Lightning's own."""
    for each in given:
        modules = {base.__module__.partition(".")[0] for base in type(each).__mro__}
        if "pytorch_lightning" in modules:
            raise TypeError(
                f"{type(each).__qualname__} is of the package pytorch_lightning, and this trainer "
                "of lightning, which has classes of its own. Replace `import pytorch_lightning as "
                "pl` by `import lightning.pytorch as pl`."
            )


def _metrics(trainer: Any) -> dict[str, Any]:
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**logged, "epoch": trainer.current_epoch, "step": trainer.global_step}


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return [*given] if isinstance(given, list | tuple) else [given]


def _checkpoint_of(fit: int) -> Path | None:
    """What a fit resumes from; None if it begins.

    Raises:
        ValueError: a later one has made it.
    """
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return None
    directory = Path(checkpoint.path)
    file = directory / _FIT_FILE
    # One without may be from elsewhere.
    made_by = int(file.read_text()) if file.exists() else fit
    return directory if _fits.resumes(fit, made_by=made_by) else None


def _refuse_unsafe(saved: Path) -> None:
    """Now, and not when a restart loads it."""
    if not saved.is_file():
        return
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(saved)
    if unsafe:
        raise TypeError(
            f"The checkpoint holds {', '.join(sorted(unsafe))}, which is no plain data: a restart "
            "would refuse to load it (weights_only). Leave it out, for example by "
            "save_hyperparameters(ignore=[…]), name it by torch.serialization.add_safe_globals, or "
            "trust the run's checkpoints: fit(…, weights_only=False)."
        )


@cache
def _tell_of_weights() -> None:
    logger.warning(
        "ModelCheckpoint(save_weights_only=True): weights alone are no checkpoint of the run. "
        "A restart resumes from others, or starts again."
    )


@cache
def _tell_of_several_loaders() -> None:
    logger.warning(
        "With several training data loaders a run resumes at the start of an epoch only: what is "
        "saved in the middle of one is no checkpoint of the run."
    )
