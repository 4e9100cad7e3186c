"""Runs of torch's that may fail once, and what their models are compared by.

Tests of TensorFlow's import this module too, and so do their workers: none needs torch for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from polytrain import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
)
from polytrain_plugins import Demand, Job
from polytrain_torch import Torch

if TYPE_CHECKING:
    import torch

DEEPSPEED = "deepspeed_without_mlflow"
"""Imports DeepSpeed. Accelerate, so also the Trainer of transformers, does so in each worker."""

HUGGING_FACE = (
    # The optimizer of each engine imports the second.
    *(DEEPSPEED, "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("torchmetrics", "transformers"),
    *(f"polytrain_torch.{name}" for name in ("accelerate", "deepspeed", "transformers")),
)
"""Libraries that import each other: tests of one of them share their zygote with the others'."""

KERAS_ON_TORCH = "keras_on_torch"
"""Imports Keras on torch, with what polytrain adds to it."""


@dataclass(frozen=True, kw_only=True)
class TorchWith(Torch):
    """torch, with libraries on top of it imported before the zygote forks.

    Otherwise each worker imports them for seconds in each attempt.
    """

    libraries: tuple[str, ...]

    def demand(self, job: Job) -> Demand:
        demand = super().demand(job)
        return dataclasses.replace(demand, preload=(*demand.preload, *self.libraries))


@contextmanager
def libraries_in_zygotes(*libraries: str) -> Iterator[None]:
    """Have them imported before the zygote forks, as `TorchWith` does, for jobs of a script."""
    demand = Torch.demand

    def with_libraries(backend: Torch, job: Job) -> Demand:
        without = demand(backend, job)
        return dataclasses.replace(without, preload=(*without.preload, *libraries))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Torch, "demand", with_libraries)
        yield


def fit(
    quiet: RunConfig,
    function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    *,
    workers: int = 2,
    libraries: tuple[str, ...] = (),
    datasets: Mapping[str, Any] | None = None,
    restore_from: Checkpoint | None = None,
    **changes: Any,
) -> Result:
    trainer = Trainer(
        TorchWith(libraries=libraries),
        function,
        train_loop_config=config,
        datasets=datasets,
        restore_from=restore_from,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(
            quiet, **{"failure_config": FailureConfig(max_failures=1), **changes}
        ),
    )
    return trainer.fit()


def equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """To the last bit."""
    import torch

    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)
