"""Weights steps and logged means by rows if ranks have different numbers of rows.

With `sync_dist=True` Lightning divides the mean of the ranks' sums by the mean of their row counts.
The counts are integers, and so is their mean: of 3 and 2 it is 2. It averages a step's value over
ranks without counts.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from polytrain_torch.libraries import needed
from polytrain_torch.row_weights import WeightedLoop, weight_of, weighted_loop

with needed("lightning"):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from polytrain_torch.lightning.private import LoggedValues, set_logged_values

_MEANS = ("mean", "avg")


def weigh_ranks(trainer: Any) -> None:
    """Have a trainer weight averages over ranks by rows."""
    reduce = _Reduce(trainer.strategy.reduce)
    trainer.strategy.reduce = reduce
    fitting = trainer.fit_loop.epoch_loop
    for loop in (fitting, fitting.val_loop, trainer.validate_loop, trainer.test_loop):
        set_logged_values(loop, _Results(reduce, training=loop is fitting))


class StepWeights(Callback):
    """Weights each step by the rows of its batch if Lightning prefetches batches.

    Lightning does so if it doesn't know the number of batches, to find the last one.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._loop: WeightedLoop | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.num_training_batches == float("inf"):
            self._loop = self._stack.enter_context(weighted_loop())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self._loop is not None:
            self._loop.given(weight_of(batch))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._stack.close()
        self._loop = None


class _Reduce:
    """A strategy's `reduce`, without rounding means of integers."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.rows: int | None = None
        """This rank's rows in the mean of one step; None for any other value."""

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in _MEANS
        if not isinstance(tensor, torch.Tensor) or not is_mean:
            return self._own(tensor, group, reduce_op)
        if self.rows is not None:
            weighed = torch.stack([tensor * self.rows, torch.full_like(tensor, self.rows)])
            total, rows = self._own(weighed, group, "sum")
            return total / rows
        if not tensor.is_floating_point():
            tensor = tensor.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        return self._own(tensor, group, reduce_op)


class _Results(LoggedValues):
    """Logged values of one loop, each reduced with its number of rows."""

    batch_size: int | None

    def __init__(self, reduce: _Reduce, *, training: bool) -> None:
        super().__init__(training=training)
        self._reduce = reduce

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        # Lightning reads the batch's size only for values that it averages over an epoch.
        is_of_step = meta.is_mean_reduction and meta.on_step and meta.sync.should
        is_unknown = batch_size is None and self.batch_size is None and self.batch is not None
        if is_of_step and is_unknown:
            try:
                self.batch_size = extract_batch_size(self.batch)
            except MisconfigurationException:
                if meta.on_epoch:
                    raise
        size: int = super()._extract_batch_size(value, batch_size, meta)
        return 0 if self._is_padding() else size

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self[key].is_tensor and self[key].meta.is_sum_reduction and self._is_padding():
            value = value * 0
        # Only a step's value is reduced here; an epoch's value is reduced in `compute`.
        self._reduce.rows = batch_size
        try:
            super().update_metrics(key, value, batch_size)
        finally:
            self._reduce.rows = None

    def _is_padding(self) -> bool:
        """Whether this rank has no row in the batch, and trains on a padding row of weight 0."""
        return self.batch is not None and weight_of(self.batch) == 0
