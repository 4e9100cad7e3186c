"""For training functions that call `model.fit`: what it does is reported, saved and gone on with.

    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or build_model()
    model.fit(data, initial_epoch=checkpointed_epoch(), epochs=10, callbacks=[ReportCallback()])

Of Keras alone, so it works on any of its backends.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

import polytrain
from polytrain_tf.backend import MODEL_FILE

_EPOCH_FILE = "epoch.json"
_SEEDS_FILE = "seeds.npz"


class ReportCallback(keras.callbacks.Callback):
    """Reports the metrics of every epoch, and a checkpoint every so many and at the end.

    A checkpoint is Keras's own, `model.keras`: layers, weights, optimizer. Beside it are the random
    numbers of layers that draw, which Keras begins anew when it loads a model.
    """

    def __init__(self, *, checkpoint_frequency: int = 1) -> None:
        """
        Args:
            checkpoint_frequency: epochs between two checkpoints; 0 for none but the last.
        """
        super().__init__()
        self._frequency = checkpoint_frequency
        self._untold: tuple[int, Mapping[str, Any]] | None = None
        """The epoch before this one, and its metrics: whether it was the last shows only later."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._tell(is_last=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._untold = (epoch + 1, {name: float(value) for name, value in (logs or {}).items()})

    def on_train_end(self, logs: Any = None) -> None:
        self._tell(is_last=True)

    def _tell(self, *, is_last: bool) -> None:
        if self._untold is None:
            return
        epoch, metrics = self._untold
        self._untold = None
        is_due = self._frequency > 0 and epoch % self._frequency == 0
        if not (is_due or is_last):
            polytrain.report({"epoch": epoch, **metrics})
            return
        with tempfile.TemporaryDirectory() as directory:
            # By every rank: a strategy sums some of a model's variables when they are read.
            self.model.save(Path(directory, MODEL_FILE))
            np.savez(Path(directory, _SEEDS_FILE), *map(np.asarray, _seeds(self.model)))
            Path(directory, _EPOCH_FILE).write_text(json.dumps(epoch))
            is_kept = polytrain.get_context().get_world_rank() == 0
            polytrain.report(
                {"epoch": epoch, **metrics},
                checkpoint=polytrain.Checkpoint.from_directory(directory) if is_kept else None,
            )


def checkpointed_model() -> Any:
    """The model of the checkpoint to go on from, compiled as it was; None at first.

    Under a strategy, call it in its scope.

    Raises:
        NotInTrainerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None:
        return None
    model = keras.models.load_model(Path(checkpoint.path, MODEL_FILE))
    with np.load(Path(checkpoint.path, _SEEDS_FILE)) as saved:
        for seed, name in zip(_seeds(model), saved.files, strict=True):
            seed.assign(saved[name])
    return model


def checkpointed_epoch() -> int:
    """How many epochs the checkpoint to go on from has; 0 at first.

    Raises:
        NotInTrainerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None:
        return 0
    epoch: int = json.loads(Path(checkpoint.path, _EPOCH_FILE).read_text())
    return epoch


def _seeds(model: Any) -> list[Any]:
    """The states of its random number generators."""
    return [each for each in model.variables if each.path.endswith("seed_generator_state")]
