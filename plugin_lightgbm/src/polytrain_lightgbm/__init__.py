"""LightGBM on polytrain: one model, trained by all workers on all rows.

Importing this package imports no lightgbm; calling `network_params` neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain_lightgbm.backend import LightGBM, network_params
from polytrain_plugins import Backend, hookimpl

if TYPE_CHECKING:
    import lightgbm
    import pyarrow as pa

__all__ = ["LightGBM", "bin_reference", "network_params"]


def bin_reference(data: pa.Table, backend: LightGBM) -> lightgbm.Dataset:
    """The bins of a run, for LightGBM in one process.

    `lightgbm.Dataset(…, reference=bin_reference(data, LightGBM(label="y")))` has those that every
    worker of `Trainer(LightGBM(label="y"), datasets={"train": data})` has.

    Args:
        data: all rows that are trained on, with the columns that aren't features.
        backend: the run's options.
    """
    from polytrain_lightgbm.datasets import agreed
    from polytrain_lightgbm.relay import Star

    params = backend.booster_params(threads=0)
    alone = agreed({"train": data}, options=backend, params=params, star=Star([]), model=None)
    return alone.reference


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [LightGBM]
