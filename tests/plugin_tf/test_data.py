"""A shard as `tf.data`: its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        (np.array([2**24, 2**24 + 1, 2**53 + 1]), "int64"),
        (np.array([0, 128, 255], dtype="uint8"), "float32"),
        (np.array([0.1, 0.2, 0.3]), "float32"),
    ],
)
def test_a_column_keeps_its_numbers(tmp_path: Path, column: Any, dtype: str) -> None:
    """float32 would round ids."""

    def train() -> None:
        shard = polytrain.get_dataset_shard("train")
        data = shard.to_tf(feature_columns="x", label_columns="y", batch_size=3)
        [(x, y)] = list(data)
        assert (x.dtype.name, y.dtype.name) == (dtype, "float32")
        np.testing.assert_array_equal(x.numpy(), column.astype(dtype))

    make_trainer(
        "tensorflow",
        train,
        datasets={"train": {"x": column, "y": np.ones(3)}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
