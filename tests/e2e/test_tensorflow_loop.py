"""A loop of one's own under TensorFlow's strategy, killed in the middle of an epoch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
from tests.e2e.test_keras import DATA

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer

ROWS = 64
EPOCHS = 3


def train(config: dict[str, Any]) -> None:
    """Eight steps an epoch, a checkpoint after every third."""
    import os
    import signal
    import sys
    import tempfile
    from pathlib import Path

    import keras
    import tensorflow as tf

    import polytrain
    import polytrain_tf

    context, strategy = polytrain.get_context(), polytrain_tf.strategy()
    # AutoGraph writes it as a module.
    tf.function(lambda value: value + 1)(tf.constant(1))
    dies = context.get_world_rank() == 1 and context.get_attempt() == 0
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        epoch, steps = tf.Variable(0), tf.Variable(0)
        state = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch, steps=steps)
    start = polytrain.get_checkpoint()
    if start is not None:
        state.read(f"{start.path}/state").assert_consumed()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)[:, 0] - y)) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return tf.shape(x)[0]

    @tf.function
    def together(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    def report(rows: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            state.write(str(Path(directory, "state")))
            weights = [float(each) for array in model.get_weights() for each in array.ravel()]
            sources = [
                str(module.__file__)
                for name, module in sys.modules.items()
                if name.startswith("__autograph_generated_file")
            ]
            polytrain.report(
                {"rows": rows, "weights": weights, "sources": sources},
                checkpoint=polytrain.Checkpoint.from_directory(directory),
            )

    shard, rows = polytrain.get_dataset_shard("train"), 0
    while epoch.numpy() < config["epochs"]:
        for x, y in shard.to_tf(feature_columns="x", label_columns="y", batch_size=4):
            if dies and steps.numpy() == config["dies_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            rows += int(together(x, y))
            shard.used()
            steps.assign_add(1)
            if steps.numpy() % 3 == 0:
                report(rows)
        epoch.assign_add(1)
    report(rows)


def fit(quiet: RunConfig, *, dies_at: int) -> Result:
    return make_trainer(
        "tensorflow",
        train,
        train_loop_config={"dies_at": dies_at, "epochs": EPOCHS},
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()


def single_process() -> list[float]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    model.fit(DATA["x"], DATA["y"], batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0)
    return [float(each) for array in model.get_weights() for each in array.ravel()]


def test_a_loop_goes_on_at_the_batch_that_comes_next(quiet: RunConfig) -> None:
    """It dies in the second epoch, after a checkpoint in its middle, and ends where one process
    ends."""
    killed = fit(quiet, dies_at=14)
    assert killed.restarts == 1
    # From the checkpoint after step 12 of 24, or the one before that, with eight rows a step.
    assert killed.metrics["rows"] in (12 * 8, 15 * 8)
    np.testing.assert_allclose(killed.metrics["weights"], single_process(), atol=1e-6)
    generated = {file for report in killed.history for file in report["sources"]}
    assert generated
    assert [file for file in generated if Path(file).exists()] == []


def read_epochs(config: dict[str, Any]) -> None:
    """Of one iterable that is made before the loop over epochs."""
    import tensorflow as tf

    import polytrain

    shard = polytrain.get_dataset_shard("train")
    batches = shard.iter_tf_batches(global_batch_size=16, dtypes={"y": tf.float64})
    epochs = [list(batches) for _ in range(3)]
    first = epochs[0][0]
    polytrain.report(
        {
            "length": len(batches),
            "batches": [len(epoch) for epoch in epochs],
            "rows": [sum(int(batch["x"].shape[0]) for batch in epoch) for epoch in epochs],
            "columns": sorted(first),
            "types": [first["x"].dtype.name, first["y"].dtype.name],
            "shape": list(first["x"].shape),
        }
    )


def test_batches_of_tensors_are_read_as_often_as_there_are_epochs(quiet: RunConfig) -> None:
    metrics = (
        make_trainer(
            "tensorflow",
            read_epochs,
            datasets={"train": DATA},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=quiet,
        )
        .fit()
        .metrics
    )
    assert metrics == {
        "length": 4,
        "batches": [4] * 3,
        "rows": [ROWS // 2] * 3,
        "columns": ["x", "y"],
        "types": ["float32", "float64"],
        "shape": [8, 3],
    }
