"""Buffers that are sent to other ranks before Hugging Face's `Trainer` evaluates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.transformers.trainer import send_before_evaluations


def test_ddp_may_ignore_all_buffers() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module: Any = torch.nn.Linear(2, 2)
        module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        # As scripts do for language models, whose masks are buffers.
        module._ddp_params_and_buffers_to_ignore = ["mask"]
        trainer: Any = SimpleNamespace(
            model_wrapped=DistributedDataParallel(module), evaluation_loop=lambda: "evaluated"
        )
        send_before_evaluations(trainer)
        assert trainer.evaluation_loop() == "evaluated"
    finally:
        dist.destroy_process_group()
