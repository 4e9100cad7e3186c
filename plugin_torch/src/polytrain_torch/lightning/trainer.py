"""Lightning's trainer for the workers of a run: devices, data loaders, stops and resumption."""

from __future__ import annotations

import inspect
import itertools
import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from polytrain import get_context
from polytrain.extension import Calls
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.node_group import gradient_group
from polytrain_torch.collectives.stopping import any_rank_stops
from polytrain_torch.devices import current_device
from polytrain_torch.libraries import needed
from polytrain_torch.loaders.prepared import sharded
from polytrain_torch.models.unaveraged import keep_frozen
from polytrain_torch.private import uncompiled
from polytrain_torch.row_weights import weigh_backward
from polytrain_torch.virtual_workers import refuse_virtual_workers

with needed("lightning"):
    import lightning
    from lightning.pytorch.callbacks import ProgressBar
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy

    from polytrain_torch.lightning.buffers import SentBuffers
    from polytrain_torch.lightning.callbacks import is_search, resume_epoch, save_config_again
    from polytrain_torch.lightning.environments import WorkerEnvironment
    from polytrain_torch.lightning.kept_batches import KeptBatches, leaves_something
    from polytrain_torch.lightning.loaders import CountingLoader, PlacedLoader
    from polytrain_torch.lightning.loggers import KeptLogs, keep_version
    from polytrain_torch.lightning.private import (
        WrappingCheckpointIO,
        forget_length,
        raise_failure,
        set_splitting,
        starts_processes,
    )
    from polytrain_torch.lightning.reports import (
        CHECKPOINT_FILE,
        SEARCH,
        Reports,
        batches_of,
        checkpoint_of_fit,
        fits,
    )
    from polytrain_torch.lightning.row_weights import StepWeights, weigh_ranks

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_trainers = Calls("Trainer()")


class Trainer(lightning.Trainer):
    """Lightning's trainer, with its arguments, for the workers of a run.

    During `fit`, every checkpoint of `ModelCheckpoint` (Lightning's default one saves after each
    epoch) or `save_checkpoint` is a checkpoint of the run, with the logged metrics. The metrics of
    an epoch without a checkpoint are reported alone. `fit` resumes from the run's checkpoint, also
    in the middle of an epoch. Data loaders are split as by `prepare_data_loader`.

    Args:
        options: arguments of `lightning.Trainer`. The run sets the number of workers, with one
            device each. `use_distributed_sampler=False` leaves loaders unsplit.

    Raises:
        TypeError: a callback, logger or plugin is from the package pytorch_lightning.
        ValueError: `devices` or `num_nodes` requests a different number, or `strategy` starts
            processes of its own.
    """

    should_stop: bool

    def __init__(self, **options: Any) -> None:
        refuse_virtual_workers("Lightning")
        _refuse_other_package(*options.values())
        for name in ("devices", "num_nodes"):
            if options.pop(name, "auto") not in ("auto", -1, 1):
                raise ValueError(
                    f"{name}: the run sets the number of workers, each with one device. Leave it "
                    "out, and use ScalingConfig(num_workers=…)."
                )
        workers, device = dist.get_world_size(), current_device()
        callbacks = _as_list(options.pop("callbacks", None))
        defaults = {
            "accelerator": "gpu" if device.type == "cuda" else "cpu",
            # The run has its own progress line, and shows workers' output line by line.
            "enable_progress_bar": any(isinstance(each, ProgressBar) for each in callbacks),
        }
        self._loaders: list[PlacedLoader] = []
        """The loaders of the training."""
        self._is_replaced = False
        self._splits = bool(options.pop("use_distributed_sampler", True))
        self._reports = Reports()
        self._kept = KeptBatches(
            self._reports, loaders=lambda: self._loaders, end_epoch=self._end_epoch_of_loaders
        )
        if workers > 1 and options.get("strategy", "auto") in ("auto", "ddp"):
            options["strategy"] = DDPStrategy(process_group=gradient_group(device))
        own: dict[str, Any] = {
            "devices": [device.index] if device.type == "cuda" else 1,
            "num_nodes": workers,
            "use_distributed_sampler": False,
            "plugins": [*_as_list(options.pop("plugins", None)), WorkerEnvironment()],
            "callbacks": [self._reports, StepWeights(), SentBuffers(), *callbacks, self._kept],
        }
        super().__init__(**{**defaults, **options, **own})
        if starts_processes(self.strategy):
            raise ValueError(
                f"strategy: {options['strategy']!r} starts processes, and the run has started its "
                "workers. Leave it out, or use 'ddp' or 'ddp_find_unused_parameters_true'."
            )
        if workers > 1:
            weigh_ranks(self)
        is_own_directory = keep_version(self.loggers, _trainers.next())
        save_config_again(self.callbacks, is_own_directory=is_own_directory)
        self.strategy.process_dataloader = self._split
        # Not in the model's forward: with manual optimization, that does the whole step.
        weigh_backward(self.strategy)
        self.fit_loop.setup_data = partial(self._replace_loaders, self.fit_loop.setup_data)
        batches = self.fit_loop.epoch_loop
        batches.on_run_start = partial(self._start_batches, batches.on_run_start)
        batches.advance = partial(self._take_batch, batches.advance)
        batches.on_advance_end = partial(self._end_batch, batches.on_advance_end)
        self.fit_loop.on_advance_end = partial(self._end_pass, self.fit_loop.on_advance_end)
        self.fit_loop.on_run_start = partial(self._start, self.fit_loop.on_run_start)
        self._kept.attach(self)
        if isinstance(self.strategy, DDPStrategy):
            self.strategy.setup = partial(self._set_up, self.strategy.setup)

    @property
    def local_rank(self) -> int:
        """This worker's local rank. Lightning prepares data on local rank 0 of each node."""
        return get_context().get_local_rank()

    def fit(self, *args: Any, **options: Any) -> None:
        """Fit as Lightning does, from the run's checkpoint, or from `ckpt_path` if it has none.

        If a training function calls it several times, the call that saved the checkpoint resumes.

        Raises:
            TypeError: the module is from the package pytorch_lightning.
            ValueError: a later call saved the checkpoint, so it lacks the result of this one.
        """
        # By names: a restart replaces `ckpt_path`.
        options = dict(inspect.signature(super().fit).bind(*args, **options).arguments)
        _refuse_other_package(*options.values())
        if is_search(self.callbacks):
            # A restart searches again: a search neither resumes nor leaves a checkpoint.
            self._reports.fit = SEARCH
            super().fit(**options)
            return
        number = self._reports.fit = fits.next()
        checkpoint = checkpoint_of_fit(number)
        if checkpoint is not None:
            options["ckpt_path"] = str(checkpoint / CHECKPOINT_FILE)
            if leaves_something(checkpoint):
                self._kept.resume(checkpoint)
        self._reports.loads_anything = options.get("weights_only") is False
        if checkpoint is not None or get_context().get_attempt():
            self._keep_logs(is_fresh=options.get("ckpt_path") is None)
        super().fit(**options)
        agree_on_call("the end of Lightning's fit")

    def validate(self, *args: Any, **options: Any) -> Any:
        """Validate as Lightning does."""
        _refuse_other_package(*args, *options.values())
        return super().validate(*args, **options)

    def test(self, *args: Any, **options: Any) -> Any:
        """Test as Lightning does."""
        _refuse_other_package(*args, *options.values())
        return super().test(*args, **options)

    def save_checkpoint(
        self, filepath: Any, weights_only: Any = None, storage_options: Any = None
    ) -> None:
        """Save as Lightning does; during `fit`, also as a checkpoint of the run."""
        super().save_checkpoint(filepath, weights_only, storage_options)
        _wait_for_files(self.strategy.checkpoint_io)
        # Outside of training, callbacks such as a learning-rate finder save for themselves.
        if not self._reports.is_training:
            return
        if weights_only:
            _warn_of_weights()
            return
        if not self._end_epoch_of_loaders() and len(self._loaders) > 1:
            _warn_of_several_loaders()
            return
        self._reports.saved(self, Path(filepath))

    def end_epoch(self) -> None:
        """After a resumed epoch, have Lightning ask again for the length of an epoch."""
        if any(loader.was_resized for loader in self._loaders):
            # The known length is that of the resumed epoch.
            forget_length(self)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Predict as Lightning does: each row once, on one of the ranks."""
        _refuse_other_package(*args, *options.values())
        # Lightning's own samplers track the rows of a batch, and repeat none.
        set_splitting(self, splits=self._splits)
        try:
            return super().predict(*args, **options)
        finally:
            set_splitting(self, splits=False)

    def _end_epoch_of_loaders(self) -> bool:
        """After an epoch's last batch, have loaders continue with the next epoch; return if so."""
        is_end = bool(self.fit_loop.epoch_loop.batch_progress.is_last_batch)
        if is_end:
            for loader in self._loaders:
                loader.end_epoch()
        return is_end

    def _keep_logs(self, *, is_fresh: bool) -> None:
        logs = KeptLogs(self.loggers)
        if is_fresh:
            logs.drop_from(0)
        else:
            logs.resume()
            self._reports.logs = logs

    def _split(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader):
            return loader
        is_stream = isinstance(loader.dataset, IterableDataset)
        if (self.predicting and not is_stream) or not (self.training or self._splits):
            return loader
        if not self.training:
            return sharded(loader, device=None, keeps_place=False)
        if self._is_replaced:
            self._loaders, self._is_replaced = [], False
        name = f"data loader {len(self._loaders)} of Lightning's fit {self._reports.fit}"
        split = sharded(
            loader,
            device=None,
            name=name,
            keeps_place=self._reports.fit != SEARCH,
            is_split=not self._splits,
            taken=partial(batches_of, self),
        )
        if not split.has_place:
            return split
        is_stream = isinstance(loader.dataset, IterableDataset)
        taken = self._reports.batches_taken(self)
        self._loaders.append(
            PlacedLoader(split) if is_stream else CountingLoader(split, taken=taken)
        )
        return self._loaders[-1]

    def _start(self, own_start: Any) -> None:
        own_start()
        checkpoint = checkpoint_of_fit(self._reports.fit)
        if checkpoint is not None:
            # After the user's hooks, which may freeze parameters that training had unfrozen.
            resume_epoch(self, checkpoint)
        elif self.ckpt_path is not None and self._loaders:
            self._warn_of_place()
        # Not in the search of a finder, before the training.
        if self._reports.is_training:
            self._kept.continue_epochs(self)
            self._kept.begin(self)

    def _warn_of_place(self) -> None:
        """Warn if Lightning's checkpoint is from within an epoch, as Lightning itself would."""
        batches = self.fit_loop.epoch_loop.batch_progress
        if batches.current.ready and not batches.is_last_batch and self.is_global_zero:
            logger.warning(
                "ckpt_path=%r is from the middle of an epoch and doesn't say which rows are left: "
                "the rest of the epoch takes the epoch's first rows. To continue after the last "
                "row, pass a checkpoint of a run as restore_from.",
                str(self.ckpt_path),
            )

    def _start_batches(self, own_start: Any, fetcher: Any) -> None:
        own_start(fetcher)
        self._reports.continue_means(self)
        self._kept.continue_batches(self, fetcher)

    def _take_batch(self, own_advance: Any, fetcher: Any) -> None:
        self._reports.continue_stop_after_validation(self)
        own_advance(fetcher)

    def _end_batch(self, own_end: Any, *args: Any) -> None:
        self._kept.before_end(self)
        self._reports.continue_stop(self)
        # Lightning validates before an early stop.
        self._agree_on_stop()
        self._reports.has_validated = False
        own_end(*args)
        if self._reports.has_validated:
            self._agree_on_stop()
            self._kept.after_end(self)

    def _end_pass(self, own_end: Any) -> None:
        # Also if a hook has skipped the rest: a single batch isn't taken for a look then.
        self._end_epoch_of_loaders()
        own_end()
        self._agree_on_stop()
        if self._reports.is_training:
            self._reports.report_epoch(self)
            self._kept.after_epoch(self)

    def _agree_on_stop(self) -> None:
        self.should_stop = any_rank_stops(self.should_stop)

    def _replace_loaders(self, own_setup: Any) -> None:
        """Have the loaders that Lightning creates in this call replace the current ones."""
        self._is_replaced = True
        own_setup()
        # Not where a schedule asks for the number of steps, before the loops have their states.
        if self.fit_loop.is_resuming:
            self._reports.resume_logged(self)
            self._kept.lift_limits(self)

    def _set_up(self, own_setup: Any, trainer: Any) -> None:
        keep_frozen(
            self.lightning_module,
            wrapped_by="Lightning",
            remedy="Freeze them later, in on_train_start, and pass "
            "strategy='ddp_find_unused_parameters_true'.",
        )
        own_setup(trainer)


def _wait_for_files(checkpoint_io: Any) -> None:
    """Wait until checkpoint plugins have saved; raise the error of their threads."""
    while isinstance(checkpoint_io, WrappingCheckpointIO):
        if isinstance(checkpoint_io, AsyncCheckpointIO):
            # teardown waits for the thread. The plugin starts another one for the next file.
            checkpoint_io.teardown()
            raise_failure(checkpoint_io)
        checkpoint_io = checkpoint_io.checkpoint_io


def _refuse_other_package(*given: Any) -> None:
    """Refuse objects of the package `pytorch_lightning`, which has its own classes."""
    for each in itertools.chain.from_iterable(map(_as_list, given)):
        each = uncompiled(each)
        modules = {base.__module__.partition(".")[0] for base in type(each).__mro__}
        if "pytorch_lightning" in modules:
            raise TypeError(
                f"{type(each).__qualname__} comes from the package pytorch_lightning, and this "
                "trainer from lightning, whose classes differ. Replace `import pytorch_lightning "
                "as pl` by `import lightning.pytorch as pl`."
            )


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return [*given] if isinstance(given, list | tuple) else [given]


@cache
def _warn_of_weights() -> None:
    logger.warning(
        "ModelCheckpoint(save_weights_only=True): weights alone aren't a checkpoint of the run. "
        "A restart resumes from an earlier checkpoint, or starts again."
    )


@cache
def _warn_of_several_loaders() -> None:
    logger.warning(
        "With several training data loaders a run resumes only at the start of an epoch: files "
        "that are saved in the middle of an epoch aren't a checkpoint of the run."
    )
