"""Batches that a Python function makes are the user's: TensorFlow writes into none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from polytrain.testing.local_world import run_world
from polytrain_tf import TensorFlow
from polytrain_tf.numpy_batches import calls_python, copied


def test_views_of_an_array_keep_their_values(tmp_path: Path) -> None:
    """TensorFlow splits them over the workers, and would write errors into the labels' memory."""

    def train(config: Any) -> None:
        import keras
        import numpy as np
        import tensorflow as tf

        import polytrain
        import polytrain_tf

        def aligned(values: Any) -> Any:
            """A copy that TensorFlow takes as it is."""
            memory = np.empty(values.nbytes + 64, np.uint8)
            start = -memory.ctypes.data % 64
            array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
            array[:] = values
            return array

        x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
        y = x.sum(axis=1)
        rows, labels = aligned(x), aligned(y)
        dataset = tf.data.Dataset.from_generator(
            lambda: ((rows[at : at + 16], labels[at : at + 16]) for at in range(0, 64, 16)),
            output_signature=(tf.TensorSpec((None, 16)), tf.TensorSpec((None,))),
        )
        strategy = polytrain_tf.strategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse")

        @tf.function
        def step(batches: Any) -> None:
            strategy.run(lambda batch: tf.square(batch[1] - 1.0), args=(next(batches),))

        def is_untouched() -> bool:
            return np.array_equal(rows, x) and np.array_equal(labels, y)

        found = {}
        model.fit(dataset, epochs=2, verbose=0)
        found["fit"] = is_untouched()
        model.evaluate(dataset, verbose=0)
        found["evaluate"] = is_untouched()
        batches = iter(strategy.experimental_distribute_dataset(dataset))
        for _ in range(4):
            step(batches)
        found["a loop"] = is_untouched()
        polytrain.report(found)

    record = run_world(
        TensorFlow(timeout_s=60),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        training_function=train,
        training_config={},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    for rank in record.ranks:
        assert rank.reports[0].metrics == {"fit": True, "evaluate": True, "a loop": True}


NUMBERS = tf.data.Dataset.range(3)


def generated(value: Any, spec: Any) -> Any:
    return tf.data.Dataset.from_generator(lambda: iter([value] * 3), output_signature=spec)


def from_numpy(number: Any) -> Any:
    return tf.numpy_function(np.asarray, [number], tf.int64)


@pytest.mark.parametrize(
    ("dataset", "is_python"),
    [
        (NUMBERS, False),
        (NUMBERS.map(lambda number: number + 1).batch(2), False),
        (NUMBERS.map(from_numpy), True),
        (NUMBERS.map(lambda number: tf.py_function(np.asarray, [number], tf.int64)), True),
        (NUMBERS.map(lambda n: tf.cond(n > 1, lambda: from_numpy(n), lambda: n)), True),
        (NUMBERS.interleave(lambda number: NUMBERS.map(from_numpy)), True),
        (tf.data.Dataset.zip((NUMBERS, NUMBERS.map(from_numpy))).batch(2).prefetch(1), True),
        (generated(1, tf.TensorSpec((), tf.int64)).shuffle(3, seed=1), True),
    ],
)
def test_data_sets_that_call_python_are_known(dataset: Any, is_python: bool) -> None:
    assert calls_python(dataset) == is_python
    assert (copied(dataset) is dataset) == (not is_python)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        ([1.5, 2.5], tf.TensorSpec((2,), tf.bfloat16)),
        ((1, True), (tf.TensorSpec((), tf.uint8), tf.TensorSpec((), tf.bool))),
        (
            {"x": "text", "y": 1 + 2j},
            {"x": tf.TensorSpec((), tf.string), "y": tf.TensorSpec((), tf.complex64)},
        ),
        (tf.ragged.constant([[1.0, 2.0], [3.0]]), tf.RaggedTensorSpec((2, None), tf.float32)),
        (tf.sparse.from_dense([0.0, 1.0]), tf.SparseTensorSpec((2,), tf.float32)),
    ],
)
def test_copies_are_what_they_were(value: Any, spec: Any) -> None:
    dataset = generated(value, spec)
    ours = copied(dataset)
    assert ours.element_spec == dataset.element_spec
    for one, other in zip(ours, dataset, strict=True):
        for mine, theirs in zip(
            tf.nest.flatten(one, expand_composites=True),
            tf.nest.flatten(other, expand_composites=True),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
