"""A checkpoint that no restart could load is told when the first one is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from polytrain import Result, RunConfig, ScalingConfig, TrainingFailedError, make_trainer
from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model


def own_loss(y: Any, predicted: Any) -> Any:
    return keras.ops.square(predicted - y)


class OwnCompile(keras.Sequential):  # type: ignore[misc]  # keras has no types
    def compile(self, **options: Any) -> None:
        super().compile(**options)


def run(path: Path, model: Any, loss: Any, loads: Any, **options: Any) -> Result:
    """Three epochs inline, each of which is saved.

    Args:
        path: of the storage.
        model: its class.
        loss: its loss.
        loads: called for the model of the checkpoint.
        options: of the trainer.
    """

    def train() -> None:
        loaded = loads()
        if loaded is None:
            loaded = model([keras.Input((1,)), keras.layers.Dense(1)])
            loaded.compile(optimizer="adam", loss=loss)
        loaded.fit(
            np.ones((4, 1)),
            np.ones(4),
            initial_epoch=checkpointed_epoch(),
            epochs=3,
            verbose=0,
            callbacks=[ReportCallback()],
        )

    return make_trainer(
        "tensorflow",
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=path, progress=False),
        **options,
    ).fit()


def test_a_loss_that_keras_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"(?s)own_loss.*custom_objects=") as raised:
        run(tmp_path, keras.Sequential, own_loss, checkpointed_model)
    assert "register_keras_serializable" in str(raised.value)


def test_a_model_that_would_not_be_compiled(tmp_path: Path) -> None:
    def loads() -> Any:
        return checkpointed_model(custom_objects={"OwnCompile": OwnCompile})

    with pytest.raises(TrainingFailedError, match=r"OwnCompile.*compile_from_config"):
        run(tmp_path, OwnCompile, "mse", loads)


def test_a_loss_that_it_is_reported(tmp_path: Path) -> None:
    def loads() -> Any:
        return checkpointed_model(custom_objects={"own_loss": own_loss})

    first = run(tmp_path, keras.Sequential, own_loss, loads)
    again = run(tmp_path, keras.Sequential, own_loss, loads, restore_from=first.checkpoint)
    assert [report["epoch"] for report in first.history] == [1, 2, 3]
    assert again.history == ()


def test_a_function_that_never_loads_the_model(tmp_path: Path) -> None:
    assert len(run(tmp_path, keras.Sequential, own_loss, lambda: None).history) == 3
