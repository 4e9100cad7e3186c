"""LightGBM on polytrain: all workers train one model on all rows.

Importing this package or calling `network_params` doesn't import lightgbm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain_lightgbm.backend import LightGBM, network_params
from polytrain_lightgbm.backend import network_params as get_network_params
from polytrain_plugins import Backend, hookimpl

if TYPE_CHECKING:
    import lightgbm
    import pyarrow as pa

    from polytrain_lightgbm.reporting import RayTrainReportCallback

__all__ = [
    "LightGBM",
    "RayTrainReportCallback",
    "bin_reference",
    "get_network_params",
    "network_params",
    "normalize_pandas_for_lightgbm",
]


def __getattr__(name: str) -> Any:
    if name != "RayTrainReportCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polytrain_lightgbm.reporting import RayTrainReportCallback

    return RayTrainReportCallback


def normalize_pandas_for_lightgbm(df: Any) -> Any:
    """Convert a frame's Arrow-backed numbers and booleans to pandas' nullable types.

    LightGBM takes those. Other columns are unchanged.

    Args:
        df: a `pandas.DataFrame`.
    """
    import pandas as pd

    kinds = {"i": "Int", "u": "UInt", "f": "Float"}
    nullable = {}
    for name, dtype in df.dtypes.items():
        if not isinstance(dtype, pd.ArrowDtype):
            continue
        if dtype.kind == "b":
            nullable[name] = "boolean"
        elif dtype.kind in kinds:
            # pandas has no nullable 16-bit float.
            bits = max(8 * dtype.itemsize, 32 if dtype.kind == "f" else 8)
            nullable[name] = f"{kinds[dtype.kind]}{bits}"
    return df.astype(nullable)


def bin_reference(data: pa.Table, backend: LightGBM) -> lightgbm.Dataset:
    """Return a data set with the bins of a run, for LightGBM in one process.

    `lightgbm.Dataset(…, reference=bin_reference(data, LightGBM(label="y")))` has the same bins as
    each worker of `Trainer(LightGBM(label="y"), datasets={"train": data})`.

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
