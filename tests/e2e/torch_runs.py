"""Runs of torch's that may fail once, and what their models are compared by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from polytrain import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)

Weights = Mapping[str, torch.Tensor]


def fit(
    quiet: RunConfig,
    function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    *,
    workers: int = 2,
    restore_from: Checkpoint | None = None,
    **changes: Any,
) -> Result:
    return make_trainer(
        "torch",
        function,
        train_loop_config=config,
        restore_from=restore_from,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(
            quiet, failure_config=FailureConfig(max_failures=1), **changes
        ),
    ).fit()


def equal(ours: Weights, theirs: Weights) -> bool:
    """To the last bit."""
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)
