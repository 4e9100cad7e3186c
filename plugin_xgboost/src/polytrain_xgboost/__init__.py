"""XGBoost on polytrain: one model, trained by all workers on all rows.

Importing this package imports no xgboost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain_plugins import Backend, hookimpl
from polytrain_xgboost.backend import XGBoost

if TYPE_CHECKING:
    import pyarrow as pa
    import xgboost

__all__ = ["XGBoost", "bin_reference"]


def bin_reference(data: pa.Table, backend: XGBoost) -> xgboost.QuantileDMatrix:
    """The bins of a run, for XGBoost in one process.

    `xgboost.QuantileDMatrix(…, ref=bin_reference(data, XGBoost(label="y")))` has those that every
    worker of `Trainer(XGBoost(label="y"), datasets={"train": data})` has, and ends in its model.

    Args:
        data: all rows that are trained on, with the columns that aren't features.
        backend: the run's options.
    """
    from polytrain_xgboost.matrices import reference

    return reference(data, backend)


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [XGBoost]
