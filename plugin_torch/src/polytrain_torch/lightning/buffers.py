"""Sends rank 0's buffers to the other ranks also if a module optimizes manually."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.libraries import needed

with needed("lightning"):
    from lightning.pytorch.callbacks import Callback


class SentBuffers(Callback):
    """Has DDP send rank 0's buffers before the next forward pass, as without manual optimization.

    With it, Lightning prepares the backward pass itself, and DDP sends buffers only before the
    first step of an attempt: ranks would validate with running means of their own, which a restart
    loses.
    """

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and not module.automatic_optimization:
            model.require_forward_param_sync = True
