"""What `model.fit` shuffles on several workers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from polytrain.testing.local_world import run_world
from polytrain_tf import TensorFlow
from polytrain_tf.shared_shuffle import check_order

ROWS = 64


def test_every_row_is_trained_once_in_every_epoch(tmp_path: Path) -> None:
    """TensorFlow splits the batches that each worker makes, so all must shuffle alike."""

    def train(config: Any) -> None:
        import random

        import keras
        import numpy as np
        import tensorflow as tf

        import polytrain
        import polytrain_tf

        random.seed(polytrain.get_context().get_world_rank())
        seen: list[int] = []

        def record(rows: Any) -> Any:
            seen.extend(map(int, rows.ravel()))
            return rows

        def loss(y: Any, predicted: Any) -> Any:
            recorded = tf.reshape(tf.numpy_function(record, [y], y.dtype), [-1])
            return tf.reduce_mean(predicted[:, 0] * recorded * 0.0)

        with polytrain_tf.strategy().scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(optimizer=keras.optimizers.SGD(0.0), loss=loss)
        rows = np.arange(float(ROWS), dtype="float32")

        data: dict[str, Any] = {"x": rows[:, None], "y": rows, "batch_size": 16}
        fits = []
        for options in (
            {"epochs": 3, **data},
            {"epochs": 4, "steps_per_epoch": 2, **data},
            {"shuffle": "batch", **data},
        ):
            seen.clear()
            model.fit(verbose=0, **options)
            fits.append([*seen])
        polytrain.report({"fits": fits})

    record = run_world(
        TensorFlow(),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        training_function=train,
        training_config={},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    first, second = (rank.reports[0].metrics["fits"] for rank in record.ranks)
    orders = []
    for passes, mine, theirs in zip((3, 2, 1), first, second, strict=True):
        half = ROWS // 2
        assert len(mine) == len(theirs) == passes * half
        for start in range(0, passes * half, half):
            one, other = mine[start : start + half], theirs[start : start + half]
            assert sorted(one + other) == [*range(ROWS)]
            orders.append(one)
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.fixture
def no_seed() -> None:
    """Forget the seeds that other tests of this process have set."""
    tf.random.set_seed(None)


@pytest.mark.usefixtures("no_seed")
@pytest.mark.parametrize("seed", [None, 1])
def test_a_dataset_that_every_worker_shuffles_for_itself_is_refused(seed: int | None) -> None:
    data = tf.data.Dataset.range(8).shuffle(8, seed=seed).batch(4).prefetch(1)
    own = tf.data.Options()
    own.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    check_order("x", data.with_options(own))
    check_order("x", np.arange(8))
    refused = pytest.raises(ValueError, match=r"shuffles without a seed.*seed=1")
    with nullcontext() if seed else refused:
        check_order("x", data)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # keras has no types
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return np.ones((4, 1)), np.ones(4)


@pytest.mark.parametrize(
    "data", [Batches(), (np.ones(4) for _ in range(3))], ids=["PyDataset", "generator"]
)
def test_batches_that_each_process_makes_for_itself_are_refused(data: Any) -> None:
    found = r"^validation_data: .*random numbers of its own.*from_generator.*shard\.to_tf"
    with pytest.raises(ValueError, match=found):
        check_order("validation_data", data)
