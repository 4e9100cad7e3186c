"""The same training under TensorFlow's strategy, with us and without.

Run as a script, it is one of two processes that find each other by TF_CONFIG.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from torch_loops import is_saved, steps_of

Config = dict[str, Any]
"""As for torch_loops."""

_LONGEST_S = 300.0


def take_steps(config: Config, strategy: Any, save: Callable[[int, Any], None]) -> None:
    """A small convolution net by Keras, in a loop under the strategy.

    Args:
        config: of the run.
        strategy: over all workers.
        save: told of a step, and the model; on every worker.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(2),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(2),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.AdamW(1e-3)
        optimizer.build(model.trainable_variables)
    images = tf.random.normal((32, 28, 28, 1))
    classes = tf.random.uniform((32,), maxval=10, dtype=tf.int64)

    def step() -> Any:
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, model(images))
            loss = tf.reduce_mean(each) / strategy.num_replicas_in_sync
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def together() -> Any:
        return strategy.reduce("SUM", strategy.run(step), axis=None)

    for number in steps_of(config):
        float(together())
        if is_saved(config, number):
            save(number, model)


def by_polytrain(config: Config) -> None:
    """Ours."""
    import polytrain
    import polytrain_tf

    rank = polytrain.get_context().get_world_rank()

    def save(step: int, model: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            model.save_weights(Path(directory, "model.weights.h5"))
            kept = polytrain.Checkpoint.from_directory(directory) if rank == 0 else None
            polytrain.report({"step": step}, checkpoint=kept)

    take_steps(config, polytrain_tf.strategy(), save)


def start_two(config: Config, environment: dict[str, str]) -> None:
    """Two processes of this script, until both have ended."""
    with ExitStack() as stack:
        # Ports that were free a moment ago: TensorFlow takes no others.
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(config)],
            env={
                **environment,
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ),
            },
        )
        for rank in range(2)
    ]
    _, waiting = psutil.wait_procs(processes, timeout=_LONGEST_S)
    for process in waiting:
        process.kill()
        process.wait()
    if any(process.returncode != 0 for process in processes):
        raise RuntimeError("TensorFlow alone has failed: its processes have said how.")


def main() -> None:
    """One of two processes."""
    import tensorflow as tf

    config = json.loads(sys.argv[1])
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def save(step: int, model: Any) -> None:
        if rank == 0:
            model.save_weights(Path(config["directory"], f"{step}.weights.h5"))

    take_steps(config, strategy, save)


if __name__ == "__main__":
    main()
