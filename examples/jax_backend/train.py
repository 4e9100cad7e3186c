"""Handwritten digits by JAX on two workers; one is killed on the way.

pip install .
pip install ./examples/jax_backend scikit-learn
python examples/jax_backend/train.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, make_trainer


def train(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from polytrain_jax import mean_over_workers

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        chances = jax.nn.log_softmax(x @ model["weights"] + model["bias"])
        return -jnp.mean(chances[jnp.arange(len(y)), y])

    gradient = jax.jit(jax.value_and_grad(loss_of))
    model = {"weights": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}
    done = 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        with np.load(Path(checkpoint.path, "model.npz")) as saved:
            model = {name: saved[name] for name in model}
            done = int(saved["epochs"])
    context = polytrain.get_context()
    shard = polytrain.get_dataset_shard("train")
    for epoch in range(done, config["epochs"]):
        dies = context.get_world_rank() == 1 and context.get_attempt() == 0
        if dies and epoch == config["epochs"] // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for batch in shard.iter_batches(batch_size=32):
            y = batch.pop("digit")
            x = np.stack(list(batch.values()), axis=1).astype(np.float32) / 16
            loss, step = mean_over_workers(gradient(model, x, y), weight=len(y))
            model = {name: np.float32(model[name] - 0.5 * step[name]) for name in model}
        with tempfile.TemporaryDirectory() as directory:
            np.savez(Path(directory, "model.npz"), **model, epochs=epoch + 1)
            is_first = context.get_world_rank() == 0
            polytrain.report(
                {"epoch": epoch + 1, "loss": float(loss), "workers": jax.process_count()},
                checkpoint=Checkpoint.from_directory(directory) if is_first else None,
            )


def main() -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    columns = {f"pixel_{number}": pixels for number, pixels in enumerate(images.T)}
    result = make_trainer(
        "jax",
        train,
        train_loop_config={"epochs": 6},
        datasets={"train": {**columns, "digit": digits}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1), progress=False),
    ).fit()
    model = result.load_model()
    guesses = (images / 16 @ model["weights"] + model["bias"]).argmax(axis=1)
    epochs = len(result.history)
    print(f"workers {result.metrics['workers']}, epochs {epochs}, restarts {result.restarts}")
    print(f"accuracy {(guesses == digits).mean():.3f}")


if __name__ == "__main__":
    main()
