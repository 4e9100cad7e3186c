"""For training functions that call `model.fit`: what it does is reported, saved and resumed.

    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or build_model()
    model.fit(data, initial_epoch=checkpointed_epoch(), epochs=10, callbacks=[ReportCallback()])

Of Keras alone, so it works on any of its backends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polytrain
from polytrain_tf.callback_state import load_callbacks, save_callbacks
from polytrain_tf.epochs import EpochCallback
from polytrain_tf.saved import Progress, has_progress, load, progress_of, save


class ReportCallback(EpochCallback):
    """Reports the metrics of every epoch, and a checkpoint every so many and at the end.

    A checkpoint is Keras's own, `model.keras`: layers, weights, optimizer. Beside it are the random
    numbers of layers that draw, which Keras begins anew when it loads a model, and what the other
    callbacks have seen. A fit that begins at `checkpointed_epoch()` goes on with that.
    """

    def __init__(self, *, checkpoint_frequency: int = 1) -> None:
        """
        Args:
            checkpoint_frequency: epochs between two checkpoints; 0 for none but the last.
        """
        super().__init__()
        self._frequency = checkpoint_frequency
        self._has_begun = False

    def is_over(self, epochs: int) -> bool:
        checkpoint = _resumed(epochs)
        return checkpoint is not None and progress_of(checkpoint).is_over

    def on_train_begin(self, logs: Any = None) -> None:
        self._has_begun = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Not as training begins: it isn't known then whether it resumes from the checkpoint.
        if not self._has_begun:
            self._has_begun = True
            checkpoint = _resumed(epoch)
            if checkpoint is not None:
                load_callbacks(self.others, checkpoint)
        super().on_epoch_begin(epoch, logs)

    def tell(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        is_due = self._frequency > 0 and epochs % self._frequency == 0
        if not (is_due or is_last):
            polytrain.report({"epoch": epochs, **metrics})
            return
        with tempfile.TemporaryDirectory() as directory:
            # By every rank: a strategy sums some of a model's variables when they are read.
            progress = Progress(epochs=epochs, is_over=self.model.stop_training)
            save(self.model, Path(directory), progress)
            save_callbacks(self.others, Path(directory))
            is_kept = polytrain.get_context().get_world_rank() == 0
            polytrain.report(
                {"epoch": epochs, **metrics},
                checkpoint=polytrain.Checkpoint.from_directory(directory) if is_kept else None,
            )


def checkpointed_model() -> Any:
    """The model of the checkpoint to resume from, compiled as it was; None at first.

    Under a strategy, call it in its scope.

    Raises:
        NotInTrainerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    return None if checkpoint is None else load(Path(checkpoint.path))


def checkpointed_epoch() -> int:
    """How many epochs the checkpoint to resume from has; 0 at first.

    Raises:
        NotInTrainerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    return 0 if checkpoint is None else progress_of(Path(checkpoint.path)).epochs


def _resumed(epochs: int) -> Path | None:
    """The checkpoint that a fit which begins after so many epochs goes on with."""
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None or not has_progress(Path(checkpoint.path)):
        return None
    path = Path(checkpoint.path)
    return path if progress_of(path).epochs == epochs else None
