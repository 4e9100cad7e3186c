"""Has all ranks evaluate with the buffers that a checkpoint has."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from polytrain_torch.private import send_buffers, uncompiled


def send_before_evaluations(trainer: Trainer) -> None:
    """Have DDP send rank 0's buffers before a trainer evaluates or predicts.

    DDP sends them in training steps only, and Transformers evaluates without DDP: each rank would
    use running means of its own since the last step, which a restart loses.
    """
    own_loop = trainer.evaluation_loop

    def evaluation_loop(*args: Any, **options: Any) -> Any:
        model = uncompiled(trainer.model_wrapped)
        if isinstance(model, DistributedDataParallel):
            send_buffers(model)
        return own_loop(*args, **options)

    trainer.evaluation_loop = evaluation_loop
