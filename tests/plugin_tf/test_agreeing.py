"""Keras's fit on two workers, where each could have a loss, a stop or statistics of its own."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

import polytrain
import polytrain_tf
from polytrain.testing.local_world import run_world
from polytrain_tf import TensorFlow

ROWS, BATCH = 32, 8
X = np.random.default_rng(0).normal(loc=1.0, scale=3.0, size=(ROWS, 1)).astype("float32")
Y = X[:, 0] * 2
WEIGHTS = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}


def mean_error(y: Any, predicted: Any) -> Any:
    return tf.reduce_mean((tf.reshape(predicted, [-1]) - tf.reshape(y, [-1])) ** 2)


class OwnStep(keras.Sequential):  # type: ignore[misc]  # keras has no types
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_error(y, self(x, training=True)) / self.divisor()
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def divisor(self) -> int:
        return 1


class DividedStep(OwnStep):
    def divisor(self) -> int:
        return int(tf.distribute.get_strategy().num_replicas_in_sync)


class Doubled(keras.Sequential):  # type: ignore[misc]  # as above
    """Its loss is Keras's, twice."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class Stops(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.model.stop_training = True


def fitted(
    *layers: Any, kind: Any = keras.Sequential, loss: Any = "mse", x: Any = X, **options: Any
) -> Any:
    """The model after two epochs, and what `fit` returned."""
    model = kind([keras.Input((1,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    model.set_weights([np.full_like(each, 0.5) for each in model.get_weights()])
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model, model.fit(x, Y[: len(x)], **options)


def weights(model: Any) -> list[float]:
    return [float(each) for array in model.get_weights() for each in array.ravel()]


def masks() -> list[float]:
    """Two steps of a layer that drops values."""
    strategy = polytrain_tf.strategy()
    layer = keras.layers.Dropout(0.5)

    def drop() -> Any:
        return layer(tf.ones((1, 64)), training=True)

    dropped = [strategy.run(tf.function(drop)) for _ in range(2)]
    return [float(each) for mask in dropped for each in tf.reshape(mask, [-1])]


def train(config: Any) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("polytrain_tf").addHandler(handler)
    is_last = polytrain.get_context().get_world_rank() == 1

    def ends(epoch: int, logs: Any) -> None:
        ending.model.stop_training = is_last

    ending = keras.callbacks.LambdaCallback(on_epoch_end=ends)
    with polytrain_tf.strategy().scope():
        normal, history = fitted(keras.layers.BatchNormalization(), validation_data=(X, Y))
        found = {
            "statistics": weights(normal)[2:4],
            "val_loss": history.history["val_loss"][-1],
            "evaluated": normal.evaluate(X, Y, verbose=0),
        }
        model, history = fitted(loss=mean_error)
        found |= {"loss": history.history["loss"], "weights": weights(model)}
        found["batches"] = []
        stops = [Stops()] if is_last else []
        for kind, callbacks in ((OwnStep, stops), (DividedStep, [ending]), (Doubled, [])):
            messages.clear()
            model, _ = fitted(kind=kind, callbacks=callbacks)
            found[kind.__name__] = weights(model), [*messages]
            found["batches"] += [int(model.optimizer.iterations.numpy())]
        found["mask"] = masks()
    shard = polytrain.get_dataset_shard("train")
    data = shard.to_tf(feature_columns="x", label_columns="y", batch_size=1)
    found["looks"] = [float(label[0]) for _, label in data.take(1)]
    rows = []
    for _, label in data:
        rows += polytrain_tf.strategy().experimental_local_results(label)[0].numpy().tolist()
    found["rows"] = rows
    with polytrain_tf.strategy().scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    matrices = shard.to_tf(feature_columns=["x"], label_columns="y", batch_size=1, as_matrix=True)
    weighted = model.fit(matrices, class_weight=WEIGHTS, epochs=2, verbose=0)
    found["weighted"] = weighted.history["loss"]
    try:
        normal.fit(data.take(1))
    except ValueError as error:
        found["refused"] = str(error)
    try:
        data.repeat()
    except AttributeError as error:
        found["absent"] = str(error)
    assert not hasattr(data, "nonsense")
    polytrain.report(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has found."""
    record = run_world(
        TensorFlow(timeout_s=90),
        data=pa.table({"x": [0.0] * 4, "y": [0.0, 1.0, 2.0, 3.0]}),
        path=tmp_path_factory.mktemp("world"),
        training_function=train,
        training_config={},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    return [rank.reports[0].metrics for rank in record.ranks]


def test_a_loss_that_is_a_mean_already_is_averaged(found: list[Any]) -> None:
    model, history = fitted(loss=mean_error)
    for rank in found:
        np.testing.assert_allclose(rank["weights"], weights(model), rtol=1e-5)
        np.testing.assert_allclose(rank["loss"], history.history["loss"], rtol=1e-5)


def test_a_step_that_adds_up_is_reported(found: list[Any]) -> None:
    for rank in found:
        _, message = rank["OwnStep"]
        assert len(message) == 1
        assert "OwnStep: gradients of a loss that train_step" in message[0]
        assert "num_replicas_in_sync" in message[0]
        divided, _ = rank["DividedStep"]
        np.testing.assert_allclose(divided, weights(fitted(kind=OwnStep, epochs=1)[0]), rtol=1e-5)
        ours, message = rank["Doubled"]
        np.testing.assert_allclose(ours, weights(fitted(kind=Doubled)[0]), rtol=1e-5)
        assert message == []


def test_statistics_are_those_of_all_workers(found: list[Any]) -> None:
    """Their mean, when they are evaluated too: each worker sees a half of each batch."""
    halves = X.reshape(-1, 2, BATCH // 2, 1)
    alone = [
        weights(fitted(keras.layers.BatchNormalization(), x=half, batch_size=BATCH // 2)[0])[2:4]
        for half in (halves[:, 0].reshape(-1, 1), halves[:, 1].reshape(-1, 1))
    ]
    for rank in found:
        np.testing.assert_allclose(rank["statistics"], np.mean(alone, axis=0), rtol=1e-5)
        np.testing.assert_allclose(rank["val_loss"], rank["evaluated"], rtol=1e-5)


def test_each_worker_drops_others(found: list[Any]) -> None:
    halves = [rank["mask"][start : start + 64] for rank in found for start in (0, 64)]
    assert all(set(half) == {0.0, 2.0} for half in halves)
    assert len({tuple(half) for half in halves}) == 4


def test_one_worker_stops_all(found: list[Any]) -> None:
    """In the middle of an epoch, by a callback that it alone has; and at the end of one."""
    assert [rank["batches"] for rank in found] == [[3, ROWS // BATCH, 2 * ROWS // BATCH]] * 2


def test_a_look_at_the_first_batch_takes_none_away(found: list[Any]) -> None:
    assert [rank["looks"] for rank in found] == [rank["rows"][:1] for rank in found]
    assert sorted(row for rank in found for row in rank["rows"]) == [0.0, 1.0, 2.0, 3.0]
    assert all("shard.to_tf(…) itself, and steps_per_epoch" in rank["refused"] for rank in found)


def test_classes_of_a_shard_have_their_weights(found: list[Any]) -> None:
    """Of the rows of both workers, for which the model predicts 0."""
    mean = np.mean([weight * label**2 for label, weight in WEIGHTS.items()])
    assert [rank["weighted"] for rank in found] == [[pytest.approx(mean)] * 2] * 2


def test_what_batches_of_several_workers_lack_is_said(found: list[Any]) -> None:
    assert all("no repeat(). Each iteration is an epoch" in rank["absent"] for rank in found)
