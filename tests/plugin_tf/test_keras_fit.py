"""The patch of Keras's trainer: refused for a Keras that it wasn't checked against, and undone."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from polytrain_tf.keras_fit import CHECKED_KERAS, keras_trainer_patched


def patched_functions() -> tuple[object, ...]:
    from keras.src.losses import loss
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    return (
        trainer.TensorFlowTrainer._maybe_symbolic_build,
        trainer.reduce_per_replica,
        BaseOptimizer._clip_gradients,
        loss.reduce_values,
        trainer.TFEpochIterator._get_iterator,
    )


def test_the_patch_is_gone_after_its_block() -> None:
    own = patched_functions()
    with keras_trainer_patched():
        inside = patched_functions()
        assert all(now is not before for now, before in zip(inside, own, strict=True))
    assert patched_functions() == own


def test_a_second_patch_changes_nothing() -> None:
    own = patched_functions()
    with keras_trainer_patched():
        once = patched_functions()
        with keras_trainer_patched():
            assert patched_functions() == once
        assert patched_functions() == once, "the inner block took the outer's patch away"
    assert patched_functions() == own


def test_an_unchecked_keras_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    own = patched_functions()
    monkeypatch.setattr(keras, "__version__", "99.1.0")
    refused = pytest.raises(RuntimeError, match=r"this is Keras 99\.1\.0")
    with refused as caught, keras_trainer_patched():
        pass
    assert CHECKED_KERAS[0] in str(caught.value)
    assert patched_functions() == own


def test_the_installed_keras_has_been_checked() -> None:
    assert keras.__version__.startswith(CHECKED_KERAS)


def test_a_model_that_is_built_needs_no_batch_to_be_built_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = []

    def rows() -> Iterator[tuple[list[float], float]]:
        passes.append("begun")
        yield from [([1.0, 2.0], 3.0), ([4.0, 5.0], 6.0)]

    signature = tf.TensorSpec((2,)), tf.TensorSpec(())
    data = tf.data.Dataset.from_generator(rows, output_signature=signature).batch(1)
    monkeypatch.setattr(trainer, "_collective_all_reduce_multi_worker", lambda strategy: True)
    with keras_trainer_patched():
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        model.fit(data, verbose=0)
        assert model.built
        passes.clear()
        model.fit(data, verbose=0)
        model.evaluate(data, verbose=0)
    assert passes == ["begun", "begun"], "one for each, and none to build from"
