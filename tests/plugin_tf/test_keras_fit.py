"""The patch of Keras's trainer: refused for a Keras that it wasn't checked against, and undone."""

from __future__ import annotations

import keras
import pytest

from polytrain_tf.keras_fit import CHECKED_KERAS, keras_trainer_patched, patch_keras_trainer


def patched_functions() -> tuple[object, ...]:
    from keras.src.backend.tensorflow import trainer
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
    undo = patch_keras_trainer()
    try:
        once = patched_functions()
        assert patch_keras_trainer() is undo
        with keras_trainer_patched():
            assert patched_functions() == once
        assert patched_functions() == once, "the inner block took the outer's patch away"
    finally:
        undo()
        undo()
    assert patched_functions() == own


def test_an_unchecked_keras_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    own = patched_functions()
    monkeypatch.setattr(keras, "__version__", "99.1.0")
    with pytest.raises(RuntimeError, match=r"this is Keras 99\.1\.0") as caught:
        patch_keras_trainer()
    assert CHECKED_KERAS[0] in str(caught.value)
    assert patched_functions() == own


def test_the_installed_keras_has_been_checked() -> None:
    assert keras.__version__.startswith(CHECKED_KERAS)
