"""A shard as `tf.data`: its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polytrain
from polytrain import DataConfig, RunConfig, ScalingConfig, make_trainer


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


@pytest.mark.parametrize(("prefetched", "looked_at"), [(8, 1), (1, 9)])
def test_a_look_uses_up_no_epoch(tmp_path: Path, prefetched: int, looked_at: int) -> None:
    """Also if all batches are taken for it."""

    def train() -> None:
        shard = polytrain.get_dataset_shard("train")
        data = shard.to_tf(
            feature_columns="x", label_columns="x", batch_size=12, prefetch_batches=prefetched
        )
        for epoch in range(2):
            looks = [rows.numpy().tolist() for rows, _ in data.take(looked_at)]
            one, other = [rows.numpy().tolist() for rows, _ in data]
            assert looks in ([one], [one, other])
            polytrain.report({"epoch": epoch, "rows": one + other})

    result = make_trainer(
        "tensorflow",
        train,
        datasets={"train": {"x": np.arange(24)}},
        dataset_config={"train": DataConfig(shuffle=True, seed=1)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    first, second = (report["rows"] for report in result.history)
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_types_that_would_change_values_are_refused(tmp_path: Path) -> None:
    def train() -> None:
        import tensorflow as tf

        shard = polytrain.get_dataset_shard("train")
        for name, what in (("x", "300, and"), ("y", "a missing value or NaN")):
            with pytest.raises(ValueError, match=f"'{name}' has {what}"):
                list(shard.iter_tf_batches(dtypes={name: tf.int8}))
            spec = tf.TensorSpec((None,), tf.int8)
            with pytest.raises(Exception, match=f"'{name}' has {what}"):
                list(shard.to_tf(name, name, feature_type_spec=spec))
        with pytest.raises(ValueError, match="'z', which isn't there"):
            shard.iter_tf_batches(dtypes={"z": tf.int8})

    make_trainer(
        "tensorflow",
        train,
        datasets={"train": {"x": np.array([1, 300]), "y": np.array([1.0, np.nan])}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()


def shapes(shard: Any, *columns: Any, **options: Any) -> Any:
    """Types and shapes of the only batch."""
    import tensorflow as tf

    [batch] = list(shard.to_tf(*columns, batch_size=3, **options))
    return tf.nest.map_structure(lambda each: (each.dtype.name, tuple(each.shape)), batch)


def test_several_columns_are_dicts_by_name(tmp_path: Path) -> None:
    one = ("float32", (3,))

    def train() -> None:
        import tensorflow as tf

        shard = polytrain.get_dataset_shard("train")
        assert shapes(shard, "x", "y") == (one, one)
        assert shapes(shard, ["x", "id"], ["y"], additional_columns="w") == (
            {"x": one, "id": ("int64", (3,))},
            {"y": one},
            one,
        )
        assert shapes(shard, ["x", "id"], "y", as_matrix=True) == (("float32", (3, 2)), one)
        spec = tf.TensorSpec((None,), tf.float64)
        assert shapes(
            shard,
            ["x", "id"],
            "y",
            feature_type_spec={"id": tf.TensorSpec((None,), tf.int32)},
            label_type_spec=spec,
            additional_columns=["w"],
            additional_type_spec={"w": spec},
            prefetch_batches=4,
        ) == (
            {"x": one, "id": ("int32", (3,))},
            ("float64", (3,)),
            {"w": ("float64", (3,))},
        )
        for options, error in (
            ({"additional_columns": "w", "weight_column": "w"}, "which are the same"),
            ({"local_shuffle_buffer_size": 9}, 'DataConfig.shuffle="window"'),
        ):
            with pytest.raises(ValueError, match=error):
                shard.to_tf("x", "y", **options)
        with pytest.raises(KeyError, match="No column 'why'"):
            shard.to_tf("x", ["y", "why"])

    columns = {"x": np.arange(3) / 2, "id": np.arange(3), "y": np.ones(3), "w": np.ones(3)}
    make_trainer(
        "tensorflow",
        train,
        datasets={"train": columns},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
