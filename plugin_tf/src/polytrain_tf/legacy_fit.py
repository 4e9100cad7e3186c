"""Makes tf_keras's `fit` and `evaluate` take a shard's batches on several workers.

tf_keras expects the number of steps of a distributed data set, and one iterator for all epochs. A
shard knows its number of batches, which is smaller in the epoch that a restart resumes, and each
epoch begins anew.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any


def patch_tf_keras() -> None:
    """Patch tf_keras in this process, if the process uses it. A second call changes nothing."""
    is_wanted = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if is_wanted or "tf_keras" in sys.modules:
        _patch()


@functools.cache
def _patch() -> None:
    from tf_keras.src.engine.data_adapter import DataHandler, DatasetAdapter

    own_check, own_epochs = DatasetAdapter._validate_args, DataHandler.enumerate_epochs

    @functools.wraps(own_check)
    def check(self: Any, y: Any, sample_weights: Any, steps: Any, *others: Any) -> None:
        known = self._dataset.cardinality() if _is_shard(self._dataset) else None
        own_check(self, y, sample_weights, known if steps is None else steps, *others)

    @functools.wraps(own_epochs)
    def epochs(self: Any) -> Iterator[tuple[int, Any]]:
        if not _is_shard(self._dataset) or self._steps_per_epoch is not None:
            yield from own_epochs(self)
            return
        with self._truncate_execution_to_epoch():
            for epoch in range(self._initial_epoch, self._epochs):
                self._inferred_steps = int(self._dataset.cardinality())
                yield epoch, iter(self._dataset)
                self._adapter.on_epoch_end()

    DatasetAdapter._validate_args = check
    DataHandler.enumerate_epochs = epochs


def _is_shard(dataset: Any) -> bool:
    """Whether it is of `shard.to_tf`, for several workers."""
    from tensorflow import distribute

    return hasattr(dataset, "polytrain_shard") and isinstance(
        dataset, distribute.DistributedDataset
    )
