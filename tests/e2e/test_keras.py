"""`model.fit` with the callback that reports, killed and resumed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.e2e import torch_runs
from tests.e2e.torch_runs import KERAS_ON_TORCH, TorchWith
from tests.sweeps import only_in_sweep

from polytrain import (
    DataConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    make_trainer,
)
from polytrain_plugins import Backend
from polytrain_tf import TensorFlow

ON_TORCH = (KERAS_ON_TORCH, "polytrain_tf.reporting")
"""What the training functions with Keras on torch import."""

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"x": X, "y": X.sum(axis=1)}


def train(config: dict[str, Any]) -> None:
    """With dropout, and an optimizer that remembers."""
    import os
    import signal

    import keras

    import polytrain
    import polytrain_tf
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    def build() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
        return model

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # it is Any here
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            context = polytrain.get_context()
            dies = context.get_world_rank() == 1 and context.get_attempt() == 0
            if dies and self.steps == config["dies_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or build()
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    shard = polytrain.get_dataset_shard("train")
    model.fit(
        shard.to_tf(feature_columns="x", label_columns="y", batch_size=8),
        initial_epoch=checkpointed_epoch(),
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[slower, Dies(), ReportCallback(checkpoint_frequency=2)],
    )


def train_on_torch(config: dict[str, Any]) -> None:
    """Whole batches of the same rows on one worker, and a part of each on two."""
    import os
    import signal

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np
    import torch
    import torch.distributed as dist

    import polytrain
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model
    from polytrain_torch.keras import prepare_model

    context = polytrain.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()

    def build() -> Any:
        # Rank 0's weights are everybody's.
        keras.utils.set_random_seed(rank)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
        )
        # A step adds up gradients of two epochs.
        adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=3)
        model.compile(optimizer=adam, loss="mse")
        return model

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # it is Any here
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if rank == 1 and context.get_attempt() == 0 and self.steps == config["dies_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    class Draws(keras.callbacks.Callback):  # type: ignore[misc]  # as above
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["drawn"] = torch.rand(())
            dist.all_reduce(logs["drawn"])

    part = 8 // size
    rows = np.arange(64).reshape(8, size, part)[:, rank].ravel()
    model = prepare_model(checkpointed_model() or build())
    fitted = model.fit(
        config["x"][rows],
        config["y"][rows],
        batch_size=part,
        initial_epoch=checkpointed_epoch(),
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[
            *([keras.callbacks.TerminateOnNaN()] if rank == 0 else []),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
            # Its patience ends in the first epoch after the restart.
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=2, min_delta=1000.0),
            Draws(),
            Dies(),
            ReportCallback(),
        ],
    )
    weights = [float(each) for array in model.get_weights() for each in array.ravel()]
    polytrain.report({"weights": weights, "epochs": fitted.epoch})


def fit(quiet: RunConfig, *, dies_at: int = -1, workers: int = 2) -> Result:
    return make_trainer(
        "tensorflow",
        train,
        train_loop_config={"dies_at": dies_at},
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()


def weights(result: Result) -> np.ndarray[Any, Any]:
    return np.concatenate([each.ravel() for each in result.load_model().get_weights()])


@pytest.mark.only_in_sweep
def test_a_killed_run_ends_in_the_same_weights(quiet: RunConfig) -> None:
    """In `make test`, `test_keras_copies` has a function that is killed more often."""
    undisturbed, killed = fit(quiet), fit(quiet, dies_at=13)
    assert killed.restarts == 1
    np.testing.assert_allclose(weights(killed), weights(undisturbed), atol=1e-6)
    assert [report["epoch"] for report in killed.history] == [1, 2, 3, 4, 5]
    losses = [report["loss"] for report in killed.history]
    np.testing.assert_allclose(
        losses, [report["loss"] for report in undisturbed.history], atol=1e-6
    )


def stops_early(config: dict[str, Any]) -> None:
    """It never learns enough, is killed while it is watched for that, and when it has ended."""
    import os
    import signal

    import keras

    import polytrain
    import polytrain_tf
    from polytrain.collective import barrier
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    context = polytrain.get_context()

    def dies_in_attempt(attempt: int) -> None:
        is_last = context.get_world_rank() == context.get_world_size() - 1
        if is_last and context.get_attempt() == attempt:
            os.kill(os.getpid(), signal.SIGKILL)

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # it is Any here
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                dies_in_attempt(0)

    with polytrain_tf.strategy().scope():
        model = checkpointed_model()
        if model is None:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(optimizer="adam", loss="mse")
    fitted = model.fit(
        polytrain.get_dataset_shard("train").to_tf(
            feature_columns="x", label_columns="y", batch_size=8
        ),
        initial_epoch=checkpointed_epoch(),
        epochs=9,
        shuffle=False,
        verbose=0,
        callbacks=[
            ReportCallback(),
            keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=3),
            Dies(),
        ],
    )
    # Until rank 0 has reported the last epoch: without its checkpoint the epoch is repeated.
    barrier()
    dies_in_attempt(1)
    polytrain.report({"epochs": fitted.epoch})


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, only_in_sweep(2)])
def test_a_fit_that_was_ended_stays_so(quiet: RunConfig, workers: int) -> None:
    """And a callback counts on, where an attempt ended."""
    result = make_trainer(
        "tensorflow",
        stops_early,
        train_loop_config={},
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    assert result.restarts == 2
    assert [report.get("epoch") for report in result.history] == [1, 2, 3, 4, None]
    assert result.metrics["epochs"] == []


@pytest.mark.only_in_sweep
def test_one_worker_is_enough(quiet: RunConfig) -> None:
    """In `make test`, one fits, and dies, in the test before."""
    result = fit(quiet, workers=1)
    assert result.metrics["epoch"] == 5
    assert weights(result).shape == (3 * 8 + 8 + 8 + 1,)


def test_keras_on_torch(quiet: RunConfig) -> None:
    """Two workers end in the weights of one; and so they do if one of them was killed."""

    def fitted(workers: int, dies_at: int = -1) -> Result:
        config = {**DATA, "dies_at": dies_at}
        return torch_runs.fit(quiet, train_on_torch, config, workers=workers, libraries=ON_TORCH)

    one, two, killed = fitted(1), fitted(2), fitted(2, dies_at=17)
    assert killed.restarts == 1
    np.testing.assert_allclose(two.metrics["weights"], one.metrics["weights"], atol=1e-6)
    np.testing.assert_allclose(killed.metrics["weights"], one.metrics["weights"], atol=1e-6)
    assert one.metrics["epochs"] == [0, 1, 2, 3]
    assert killed.metrics["epochs"] in ([1, 2, 3], [2, 3])
    losses = [[report["loss"] for report in result.history[:-1]] for result in (one, two, killed)]
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, atol=1e-5)
    drawn = [[report["drawn"] for report in result.history[:-1]] for result in (two, killed)]
    assert drawn[1] == drawn[0]


def train_unlike_ranks_on_torch(config: dict[str, Any]) -> None:
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    import polytrain
    from polytrain_torch.keras import prepare_model

    rank = polytrain.get_context().get_world_rank()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    model = prepare_model(model)

    class StopsAbove(keras.callbacks.Callback):  # type: ignore[misc]  # it is Any here
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = logs["loss"] > 30

    rows = slice(0, 16 + 8 * rank * config["more"])
    # By its own rows rank 0 would go on, while rank 1 stops: theirs are a hundred off.
    y = config["y"][rows] + 10.0 * rank
    fitted = model.fit(
        config["x"][rows], y, batch_size=8, epochs=3, verbose=0, callbacks=[StopsAbove()]
    )
    polytrain.report({"epochs": len(fitted.epoch), "loss": fitted.history["loss"][0]})


def test_callbacks_decide_by_what_all_ranks_have_seen(quiet: RunConfig) -> None:
    result = torch_runs.fit(
        quiet, train_unlike_ranks_on_torch, {**DATA, "more": 0}, libraries=ON_TORCH
    )
    assert result.metrics["epochs"] == 1
    assert 30 < result.metrics["loss"] < 90


def test_ranks_with_unequal_batches_are_reported(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match=r"have 2, 3 batches.*at most 2 \* batch_size"):
        torch_runs.fit(quiet, train_unlike_ranks_on_torch, {**DATA, "more": 1}, libraries=ON_TORCH)


def train_by_tf_keras(config: dict[str, Any]) -> None:
    import tf_keras

    import polytrain
    import polytrain_tf

    tf_keras.utils.set_random_seed(0)
    with polytrain_tf.strategy().scope():
        model = tf_keras.Sequential([tf_keras.layers.Input((3,)), tf_keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    shard = polytrain.get_dataset_shard("train")
    size = 8 // polytrain.get_context().get_world_size()
    for _ in range(3):
        fitted = model.fit(
            shard.to_tf(feature_columns="x", label_columns="y", batch_size=size),
            steps_per_epoch=shard.num_batches(batch_size=size),
            shuffle=False,
            verbose=0,
        )
        weights = [float(each) for each in model.get_weights()[0].ravel()]
        polytrain.report({"loss": fitted.history["loss"][0], "weights": weights})


@pytest.mark.only_in_sweep
def test_tf_keras_needs_no_patch(quiet: RunConfig) -> None:
    """In `make test`, `test_legacy_keras` has one that reads whole epochs."""

    def fitted(workers: int) -> Result:
        return make_trainer(
            "tensorflow",
            train_by_tf_keras,
            train_loop_config={},
            datasets={"train": DATA},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=quiet,
        ).fit()

    one, two = fitted(1), fitted(2)
    losses = [[report["loss"] for report in result.history] for result in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(two.metrics["weights"], one.metrics["weights"], atol=1e-6)


def adapt(config: dict[str, Any]) -> None:
    """Adapts a layer inside a layer, to the rank's shard or to all rows."""
    import keras
    import numpy as np

    import polytrain

    if keras.backend.backend() == "torch":
        from contextlib import nullcontext as scope

        from polytrain_torch.keras import prepare_model
    else:
        import polytrain_tf

        prepare_model, scope = (lambda model: model), polytrain_tf.strategy().scope
    rows = polytrain.get_dataset_shard(config["adapts_to"]).to_pandas()["x"].to_numpy("float32")
    normalization = keras.layers.Normalization(name="scaling")
    with scope():
        normalization.adapt(rows[:, None])
        inner = keras.Sequential([keras.Input((1,)), normalization])
        model = keras.Sequential([keras.Input((1,)), inner, keras.layers.Dense(1)])
        model.compile(loss="mse")
    prepare_model(model)
    model.fit(np.ones((8, 1)), np.ones(8), batch_size=4, verbose=0)
    polytrain.report({"mean": float(np.squeeze(normalization.mean))})


@pytest.mark.parametrize(
    "backend", [TensorFlow(), TorchWith(libraries=ON_TORCH)], ids=["tensorflow", "torch"]
)
def test_a_layer_that_ranks_adapt_to_different_rows_is_refused(
    quiet: RunConfig, backend: Backend
) -> None:
    """Each rank would normalize in its own way, with the same weights."""

    def fit(adapts_to: str) -> Result:
        data = {"x": np.arange(64, dtype="float32")}
        trainer = Trainer(
            backend,
            adapt,
            train_loop_config={"adapts_to": adapts_to},
            datasets={"train": data, "all": data},
            dataset_config=DataConfig(datasets_to_split=["train"]),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=quiet,
        )
        return trainer.fit()

    with pytest.raises(
        TrainingFailedError, match=r"scaling: adapt\(\) has seen other rows.*'train'"
    ):
        fit("train")
    assert fit("all").metrics == {"mean": 31.5}
