"""LightGBM on polytrain: all workers train one model on all rows.

Importing this package or calling `network_params` doesn't import lightgbm.
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
    """Return the bins of a run, for LightGBM in one process.

    `lightgbm.Dataset(…, reference=bin_reference(data, LightGBM(label="y")))` has the bins of every
    worker of `Trainer(LightGBM(label="y"), datasets={"train": data})`.

    Args:
        data: all training rows, including the columns that aren't features.
        backend: the run's options.
    """
    from polytrain_lightgbm.collective import Collective
    from polytrain_lightgbm.datasets import agreed

    params = backend.booster_params(threads=0)
    alone = agreed(
        {"train": data}, options=backend, params=params, collective=Collective([]), model=None
    )
    return alone.reference


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """Provide the backends of this module's entry point."""
    return [LightGBM]
