"""The JAX backend passes the kit, with a training function that brings a model."""

import tempfile
from pathlib import Path

from polytrain_jax import Jax

import polytrain
from polytrain.testing import BackendConformance


def train(config):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from polytrain_jax import mean_over_workers

    def loss_of(model, x, y):
        return jnp.mean((x @ model["weights"] + model["bias"] - y) ** 2)

    gradient = jax.value_and_grad(loss_of)
    model = {"weights": np.zeros(3, np.float32), "bias": np.zeros((), np.float32)}
    epochs = 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        with np.load(Path(checkpoint.path) / "model.npz") as saved:
            model = {name: saved[name] for name in model}
            epochs = int(saved["epochs"])
    shard = polytrain.get_dataset_shard("train")
    for epoch in range(epochs, 6):
        for batch in shard.iter_batches(batch_size=20):
            y = batch.pop("label").astype(np.float32)
            x = np.stack(list(batch.values()), axis=1).astype(np.float32)
            loss, step = mean_over_workers(gradient(model, x, y), weight=len(y))
            model = {name: np.float32(model[name] - 0.1 * step[name]) for name in model}
        with tempfile.TemporaryDirectory() as directory:
            np.savez(Path(directory) / "model.npz", **model, epochs=epoch + 1)
            polytrain.report(
                {"loss": float(loss)}, checkpoint=polytrain.Checkpoint.from_directory(directory)
            )


class TestJax(BackendConformance):
    backend = Jax()
    training_function = train
