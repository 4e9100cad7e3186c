"""Handwritten digits by Keras on JAX, two workers; one is killed on the way.

pip install '.[tf-cpu]' ./examples/jax_backend scikit-learn
python examples/jax_backend/train_keras.py
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer


def train(config: dict[str, Any]) -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras
    import numpy as np

    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    class DiesOnce(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            dies = jax.process_index() == 1 and polytrain.get_context().get_attempt() == 0
            if dies and epoch == config["epochs"] // 2:
                os.kill(os.getpid(), signal.SIGKILL)

    def build() -> Any:
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    # All workers must draw the same weights, even if a checkpoint replaces them.
    keras.utils.set_random_seed(0)
    # Each worker passes its own rows, which must not be split again.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model = checkpointed_model() or build()
    rows = polytrain.get_dataset_shard("train").to_pandas()
    digits = rows.pop("digit").to_numpy()
    model.fit(
        rows.to_numpy(np.float32) / 16,
        digits,
        batch_size=16,
        initial_epoch=checkpointed_epoch(),
        epochs=config["epochs"],
        verbose=0,
        callbacks=[ReportCallback(), DiesOnce()],
    )


def main() -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    # The same number of rows on every worker, because every worker takes part in every batch.
    images, digits = images[:1792], digits[:1792]
    columns = {f"pixel_{number}": pixels for number, pixels in enumerate(images.T)}
    result = make_trainer(
        "jax",
        train,
        train_loop_config={"epochs": 6},
        datasets={"train": {**columns, "digit": digits}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1), progress=False),
    ).fit()
    saved = [path.name for path in Path(result.checkpoint.path).glob("*.keras")]
    print(f"epochs {len(result.history)}, restarts {result.restarts}, saved {', '.join(saved)}")
    print(f"accuracy {result.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
