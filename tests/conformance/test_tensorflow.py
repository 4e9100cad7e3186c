"""TensorFlow passes the kit, with a training function that brings a model."""

import tempfile
from pathlib import Path
from typing import ClassVar

import polytrain
from polytrain.testing import BackendConformance, KnownFailure
from polytrain_tf import TensorFlow


def train(config):
    import keras
    import numpy as np

    import polytrain_tf

    keras.utils.set_random_seed(0)
    with polytrain_tf.strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    epochs = 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state = np.load(Path(checkpoint.path) / "state.npz")
        model.set_weights([state["kernel"], state["bias"]])
        epochs = int(state["epochs"])
    shard = polytrain.get_dataset_shard("train")
    for epoch in range(epochs, 6):
        data = shard.to_tf(feature_columns=["x0", "x1", "x2"], label_columns="label", batch_size=20)
        loss = model.fit(data, epochs=1, verbose=0, shuffle=False).history["loss"][-1]
        with tempfile.TemporaryDirectory() as directory:
            kernel, bias = model.get_weights()
            # A .keras file holds the time at which it was written; the weights are what must agree.
            np.savez(Path(directory) / "state.npz", kernel=kernel, bias=bias, epochs=epoch + 1)
            polytrain.report(
                {"loss": loss}, checkpoint=polytrain.Checkpoint.from_directory(directory)
            )


class TestTensorFlow(BackendConformance):
    backend = TensorFlow()
    training_function = train
    known_failures: ClassVar = {
        "test_leaving_frees_every_port": KnownFailure(
            "TensorFlow's gRPC server has no way to be stopped: it ends with its process.",
            raises=AssertionError,
        ),
    }
