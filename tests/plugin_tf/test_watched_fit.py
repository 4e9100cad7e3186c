"""`model.fit` while a training function runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain.text.metrics import plain_metrics
from polytrain_tf import watched_fit
from polytrain_tf.reporting import ReportCallback
from polytrain_tf.watched_fit import _warn_of_splitting, fit_watched


def strategy(replicas: int) -> Any:
    return SimpleNamespace(num_replicas_in_sync=replicas)


def fit() -> list[float]:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    losses: list[float] = model.fit(np.ones((4, 1)), np.ones(4), verbose=0).history["loss"]
    return losses


def test_a_keras_that_can_not_fit_on_several_workers_says_so_at_once() -> None:
    why = RuntimeError("Keras 99")
    with (
        fit_watched(strategy(2), rank=0, has_shards=lambda: False, unfit=why),
        pytest.raises(RuntimeError, match="Keras 99"),
    ):
        fit()


def test_a_keras_that_can_not_resume_an_epoch_in_its_middle_says_so_at_once() -> None:
    """It would give all later epochs as few batches. From the start of an epoch it may fit."""
    rest = SimpleNamespace(polytrain_shard=None, cardinality=lambda: 3, polytrain_whole=lambda: 8)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with fit_watched(strategy(1), rank=0, has_shards=lambda: True, unfit=RuntimeError("Keras 99")):
        with pytest.raises(RuntimeError, match="Keras 99"):
            model.fit(rest)
        assert len(fit()) == 1


def test_one_worker_fits_whatever_it_likes() -> None:
    own = keras.Model.fit
    with fit_watched(strategy(1), rank=0, has_shards=lambda: True, unfit=None):
        assert len(fit()) == 1
    assert keras.Model.fit is own


def test_its_tensors_are_metrics() -> None:
    assert plain_metrics({"loss": tf.constant(1.5), "steps": tf.Variable(3)}) == {
        "loss": 1.5,
        "steps": 3,
    }
    with pytest.raises(TypeError, match=r"'losses'.*its mean"):
        plain_metrics({"losses": tf.constant([1.5, 2.5])})


def shared_model(shared: Any, optimizer: Any = "sgd") -> Any:
    """As if it were built in the scope of a strategy."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    model._distribute_strategy = shared
    return model


def from_a_shard() -> Any:
    return SimpleNamespace(polytrain_shard=SimpleNamespace(counted_by_fit=contextlib.nullcontext))


def test_loss_scaling_on_several_workers_is_refused() -> None:
    """Each would decide by its own gradients whether there is a step."""
    shared = strategy(2)
    model = shared_model(shared, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with (
        fit_watched(shared, rank=0, has_shards=lambda: False, unfit=None),
        pytest.raises(ValueError, match="mixed_bfloat16"),
    ):
        model.fit(np.ones((4, 1)), np.ones(4))


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("sgd", {"steps_per_execution": 2}, "steps_per_execution=2"),
        ("sgd", {"jit_compile": True}, "jit_compile=True"),
        (keras.optimizers.SGD(gradient_accumulation_steps=4), {}, "gradient_accumulation_steps=4"),
    ],
)
def test_steps_that_keras_can_not_take_are_refused(
    optimizer: Any, options: dict[str, Any], message: str
) -> None:
    shared = strategy(2)
    model = shared_model(shared, optimizer)
    for name, its in options.items():
        setattr(model, name, its)
    with (
        fit_watched(shared, rank=0, has_shards=lambda: False, unfit=None),
        pytest.raises(ValueError, match=f"{message}: Keras can't.* Leave it out"),
    ):
        model.fit(np.ones((4, 1)), np.ones(4))


@pytest.mark.parametrize("is_split", [True, False])
def test_arrays_for_validation_are_split_too(
    is_split: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fits(
        self: Any,
        x: Any = None,
        epochs: int = 1,
        callbacks: Any = None,
        validation_data: Any = None,
        class_weight: Any = None,
        initial_epoch: int = 0,
    ) -> None:
        """It takes anything."""

    monkeypatch.setattr(keras.Model, "fit", fits)
    monkeypatch.setattr(watched_fit, "summing", lambda strategy: list)
    shared = strategy(2)
    valid = (np.ones((4, 1)), np.ones(4)) if is_split else from_a_shard()
    _warn_of_splitting.cache_clear()
    with fit_watched(shared, rank=0, has_shards=lambda: True, unfit=None):
        shared_model(shared).fit(from_a_shard(), validation_data=valid)
    assert ("is split already" in caplog.text) == is_split


def test_a_callback_that_only_some_workers_have_report_by_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart only those would restore their callbacks."""
    monkeypatch.setattr(watched_fit, "summing", lambda strategy: lambda mine: [1, 2])
    shared = strategy(2)
    with (
        fit_watched(shared, rank=1, has_shards=lambda: True, unfit=None),
        pytest.raises(ValueError, match="1 of 2 ranks have a ReportCallback"),
    ):
        shared_model(shared).fit(np.ones((4, 1)), np.ones(4), shuffle=False)


def test_one_callback_needs_no_list() -> None:
    seen: list[int] = []
    one = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with fit_watched(strategy(1), rank=0, has_shards=lambda: True, unfit=None):
        model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=one)
    assert seen == [0]


def test_a_backup_beside_the_runs_checkpoints_is_refused(tmp_path: Path) -> None:
    """After a restart it would load other weights than the run's checkpoint has."""
    callbacks = [ReportCallback(), keras.callbacks.BackupAndRestore(tmp_path / "backup")]
    with (
        fit_watched(strategy(1), rank=0, has_shards=lambda: True, unfit=None),
        pytest.raises(ValueError, match="BackupAndRestore would load its own weights"),
    ):
        shared_model(strategy(1)).fit(np.ones((4, 1)), np.ones(4), callbacks=callbacks)


def test_a_callback_list_is_treated_as_its_callbacks(tmp_path: Path) -> None:
    shared = strategy(2)
    listed = keras.callbacks.CallbackList([keras.callbacks.BackupAndRestore(tmp_path / "backup")])
    with (
        fit_watched(shared, rank=0, has_shards=lambda: False, unfit=None),
        pytest.raises(ValueError, match="BackupAndRestore"),
    ):
        shared_model(shared).fit(np.ones((4, 1)), np.ones(4), shuffle=False, callbacks=listed)
