"""TensorFlow over two workers ends where one process ends: `model.fit`, and a loop of one's own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.sweeps import Selected

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, make_trainer

ROWS, BATCH, EPOCHS = 64, 8, 2
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]])[:, 0].astype("float32")


def build():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model


def shard_as_tf():
    shard = polytrain.get_dataset_shard("train")
    return shard.to_tf(feature_columns="x", label_columns="y", batch_size=BATCH)


def flat(model) -> list[float]:
    return np.concatenate([weights.ravel() for weights in model.get_weights()]).tolist()


def fit() -> list[float]:
    import polytrain_tf

    with polytrain_tf.strategy().scope():
        model = build()
    model.fit(shard_as_tf(), epochs=EPOCHS, verbose=0, shuffle=False)
    return flat(model)


def own_loop() -> list[float]:
    import tensorflow as tf

    import polytrain_tf

    strategy = polytrain_tf.strategy()
    with strategy.scope():
        model = build()
        optimizer = tf.keras.optimizers.SGD(0.05)

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            errors = model(features, training=True)[:, 0] - labels
            # The mean over all workers: each has as many rows as the others.
            loss = tf.reduce_mean(errors**2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train_step(batch):
        strategy.run(step, args=(batch,))

    for _ in range(EPOCHS):
        for batch in shard_as_tf():
            train_step(batch)
    return flat(model)


def single_process() -> list[float]:
    model = build()
    model.fit(X, Y, batch_size=2 * BATCH, epochs=EPOCHS, verbose=0, shuffle=False)
    return flat(model)


class Case(NamedTuple):
    """One step on each batch of the first rows."""

    rows: int
    counts: str
    """How the size of batches is given: of a worker's, or of those of all workers together."""

    size: int
    cuts: list[int]
    """The batches of all workers together that are trained on."""


def fit_case(case: Case) -> list[float]:
    import polytrain_tf

    with polytrain_tf.strategy().scope():
        model = build()
    shard = polytrain.get_dataset_shard(f"rows {case.rows}")
    batches = shard.to_tf(feature_columns="x", label_columns="y", **{case.counts: case.size})
    model.fit(batches, epochs=1, verbose=0, shuffle=False)
    return flat(model)


def train_each(config: dict[str, Any]) -> None:
    weights = [fit_case(case) for case in config["cases"]]
    polytrain.report({"fit": fit(), "own loop": own_loop(), "cases": weights})


def steps_of(cuts: list[int]) -> list[float]:
    """Where one process ends after one step on each of these batches."""
    model, first = build(), 0
    for rows in cuts:
        model.train_on_batch(X[first : first + rows], Y[first : first + rows])
        first += rows
    return flat(model)


CUTS = [
    # Rows, of the whole batch, and on two workers.
    (3, 8, [3], [3]),
    (14, 4, [4, 4, 4, 2], [4, 4, 4, 2]),
    (15, 4, [4, 4, 4, 3], [4, 4, 4, 3]),
    (13, 4, [4, 4, 2, 3], [4, 4, 2, 3]),
    (17, 8, [8, 6, 3], [8, 4, 5]),
    (19, 8, [8, 8, 3], [8, 4, 7]),
    (22, 5, None, [5, 5, 5, 2, 5]),
]
"""Rows, rows in a global batch, and the batches that are trained on: by a worker's `batch_size`,
and by `global_batch_size`, which two workers need not divide."""

CASES = [
    case
    for rows, size, of_worker, of_all in CUTS
    for case in (
        Case(rows, "batch_size", size // 2, of_worker),
        Case(rows, "global_batch_size", size, of_all),
    )
    if case.cuts is not None
]


@pytest.fixture(scope="module")
def chosen(selected: Selected) -> list[Case]:
    return selected(CASES, one_in=3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, chosen: list[Case]) -> dict[str, Any]:
    """Where two workers end: all in one run, for which TensorFlow starts once."""
    result = make_trainer(
        "tensorflow",
        train_each,
        train_loop_config={"cases": chosen},
        datasets={
            "train": {"x": X, "y": Y},
            **{f"rows {rows}": {"x": X[:rows], "y": Y[:rows]} for rows, *_ in CUTS},
        },
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False),
    ).fit()
    return result.metrics


@pytest.mark.parametrize("function", ["fit", "own loop"])
def test_two_workers_end_where_one_process_ends(found: dict[str, Any], function: str) -> None:
    assert np.allclose(found[function], single_process(), atol=1e-5)


@pytest.mark.sweep
def test_batches_of_unequal_parts_are_weighted_by_rows(
    found: dict[str, Any], chosen: list[Case]
) -> None:
    for case, weights in zip(chosen, found["cases"], strict=True):
        assert np.allclose(weights, steps_of(case.cuts), atol=1e-5), case


def fit_and_be_killed() -> None:
    """A checkpoint after each batch; the first attempt ends after the second."""
    import os
    import signal
    import tempfile
    from pathlib import Path

    import keras

    import polytrain_tf

    context = polytrain.get_context()
    start = polytrain.get_checkpoint()
    with polytrain_tf.strategy().scope():
        model = build()
        if start:
            model.load_weights(Path(start.path) / "my.weights.h5")
    batches = []

    class AfterBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)
            with tempfile.TemporaryDirectory() as directory:
                self.model.save_weights(Path(directory) / "my.weights.h5")
                on_rank_0 = context.get_world_rank() == 0
                polytrain.report(
                    {"batch": batch},
                    checkpoint=Checkpoint.from_directory(directory) if on_rank_0 else None,
                )
            if context.get_attempt() == 0 and context.get_world_rank() == 1 and batch == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    model.fit(shard_as_tf(), epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[AfterBatch()])
    polytrain.report({"weights": flat(model), "batches": len(batches)})


@pytest.mark.only_in_sweep
def test_fit_goes_on_in_the_middle_of_an_epoch(quiet: RunConfig) -> None:
    """TensorFlow takes batches ahead: what counts is what Keras has trained on. The next epoch is
    a whole one. In `make test`, `test_keras_copies` shows it."""
    result = make_trainer(
        "tensorflow",
        fit_and_be_killed,
        datasets={"train": {"x": X, "y": Y}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.restarts == 1
    assert result.metrics["batches"] < EPOCHS * (ROWS // BATCH // 2)
    assert np.allclose(result.metrics["weights"], single_process(), atol=1e-6)
