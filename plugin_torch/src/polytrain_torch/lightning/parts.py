"""Strategies, a plugin and a callback for a `lightning.Trainer`, named as in Ray Train.

    trainer = lightning.Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)

`polytrain_torch.lightning.Trainer` needs none of them, and resumes by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from polytrain import get_context, report
from polytrain_torch.checkpoints.parts import checkpoint_of, directory_of_all, part_of
from polytrain_torch.collectives.node_group import gradient_group
from polytrain_torch.devices import current_device
from polytrain_torch.libraries import needed
from polytrain_torch.lightning.buffers import SentBuffers
from polytrain_torch.lightning.environments import (
    OfWorkers,
    RayLightningEnvironment,
    WorkerEnvironment,
)
from polytrain_torch.lightning.reports import logged_metrics
from polytrain_torch.lightning.row_weights import StepWeights
from polytrain_torch.lightning.trainer import Trainer
from polytrain_torch.row_weights import weigh_backward
from polytrain_torch.virtual_workers import refuse_virtual_workers

with needed("lightning"):
    import lightning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "Trainer",
    "WorkerEnvironment",
    "prepare_trainer",
]


class _OnWorkers:
    """Makes a strategy use this worker's device, and split data loaders over the workers.

    It weights gradients by the rows of a shard's batches.
    """

    def setup_environment(self) -> None:
        weigh_backward(self)
        super().setup_environment()  # type: ignore[misc]  # Lightning's strategy comes next

    @property
    def root_device(self) -> torch.device:
        return current_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}


class RayDDPStrategy(_OnWorkers, DDPStrategy):
    """Lightning's `DDPStrategy`, with its arguments, over the run's workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if get_context().get_world_size() > 1:
            options.setdefault("process_group", gradient_group(current_device()))
        super().__init__(*args, **options)


class RayFSDPStrategy(_OnWorkers, FSDPStrategy):
    """Lightning's `FSDPStrategy`, with its arguments, over the run's workers."""


class RayDeepSpeedStrategy(_OnWorkers, DeepSpeedStrategy):
    """Lightning's `DeepSpeedStrategy`, with its arguments, over the run's workers."""


class RayTrainReportCallback(Callback):
    """Saves the trainer's state after each epoch, and reports it with the logged metrics.

    A checkpoint is one file, `checkpoint.ckpt`. A restarted training function resumes from it with
    `trainer.fit(…, ckpt_path=…)`.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the epoch."""
        metrics = logged_metrics(trainer)
        with directory_of_all() as directory:
            trainer.save_checkpoint(directory / self.CHECKPOINT_NAME, weights_only=False)
            with part_of(directory) as part:
                report(metrics, checkpoint_of(part))


def prepare_trainer(trainer: lightning.Trainer) -> lightning.Trainer:
    """Check that a trainer uses all workers of the run, and return it.

    Raises:
        ValueError: its strategy or environment doesn't know the run's workers.
    """
    refuse_virtual_workers("Lightning")
    if isinstance(trainer, Trainer):
        return trainer
    if not isinstance(trainer.strategy, _OnWorkers):
        raise ValueError(
            f"strategy: {type(trainer.strategy).__name__} doesn't know the run's workers. Pass "
            "RayDDPStrategy(), RayFSDPStrategy() or RayDeepSpeedStrategy(), or use "
            "polytrain_torch.lightning.Trainer, which needs none."
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(environment, OfWorkers):
        raise ValueError(
            f"plugins: {type(environment).__name__} doesn't know the run's workers. Pass "
            "plugins=[RayLightningEnvironment()]."
        )
    trainer.callbacks += [StepWeights(), SentBuffers()]
    return trainer
