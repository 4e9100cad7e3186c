"""XGBoost on polytrain: all workers train one model on all rows.

Importing this package doesn't import xgboost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain_plugins import Backend, hookimpl
from polytrain_xgboost.backend import XGBoost

if TYPE_CHECKING:
    import pyarrow as pa
    import xgboost

    from polytrain_xgboost.reporting import RayTrainReportCallback

__all__ = ["RayTrainReportCallback", "XGBoost", "bin_reference"]


def __getattr__(name: str) -> Any:
    if name != "RayTrainReportCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polytrain_xgboost.reporting import RayTrainReportCallback

    return RayTrainReportCallback


def bin_reference(data: pa.Table, backend: XGBoost) -> xgboost.QuantileDMatrix:
    """Return a matrix with the bins of a run, for XGBoost in one process.

    `xgboost.QuantileDMatrix(…, ref=bin_reference(data, XGBoost(label="y")))` has the same bins as
    each worker of `Trainer(XGBoost(label="y"), datasets={"train": data})`, and leads to the same
    model. With a model to continue there may be more bins than usual: then also pass the returned
    matrix's `max_bin`, to the new matrix and in the parameters.

    Args:
        data: all training rows, including the columns that aren't features.
        backend: the run's options.
    """
    from polytrain_xgboost.matrices import reference

    return reference(data, backend)


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """Provide the backends of this module's entry point."""
    return [XGBoost]
