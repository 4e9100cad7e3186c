"""Weighs steps, and means that Lightning logs, by rows where ranks have unequal numbers.

With `sync_dist=True` Lightning divides the mean of the ranks' sums by the mean of their counts of
rows. The counts are whole numbers, and so is their mean: of 3 and 2 rows it is 2. A step's value is
averaged over ranks without their counts.
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
    """Let a trainer of several ranks weigh what it averages over them by their rows."""
    reduce = _Reduce(trainer.strategy.reduce)
    trainer.strategy.reduce = reduce
    fitting = trainer.fit_loop.epoch_loop
    for loop in (fitting, fitting.val_loop, trainer.validate_loop, trainer.test_loop):
        set_logged_values(loop, _Results(reduce, training=loop is fitting))


class StepWeights(Callback):
    """Weighs each step by the rows of its batch where Lightning takes batches ahead.

    It does so if it doesn't know their number, to learn which one is the last.
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
    """A strategy's `reduce`, with a mean of whole numbers that isn't rounded."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.rows: int | None = None
        """Rows that the mean of one step is over on this rank; None for any other value."""

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
    """Values that are logged in one loop, each reduced with the number of its rows."""

    batch_size: int | None

    def __init__(self, reduce: _Reduce, *, training: bool) -> None:
        super().__init__(training=training)
        self._reduce = reduce

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        # Lightning looks at the batch only for what it averages over an epoch.
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
        # Only a step's value is reduced in here; an epoch's is when it is computed.
        self._reduce.rows = batch_size
        try:
            super().update_metrics(key, value, batch_size)
        finally:
            self._reduce.rows = None

    def _is_padding(self) -> bool:
        """Whether this rank has no row in the batch, and trains on one that counts nothing."""
        return self.batch is not None and weight_of(self.batch) == 0
