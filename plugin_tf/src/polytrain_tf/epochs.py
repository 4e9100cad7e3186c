"""Reports each Keras epoch once it is known whether it was the last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from polytrain_tf.saved import Progress


class EpochCallback(keras.callbacks.Callback, ABC):
    """Reports an epoch when the next one begins, or when training ends.

    By then every callback has handled the end of the epoch, and may have ended training.

    Pass the arguments of `fit` through `arrange`, so that this callback precedes all others when an
    epoch begins. Otherwise a change that another callback makes then, such as a new learning rate,
    would be saved in the checkpoint, and made again after a restart.
    """

    others: Sequence[Any] = ()
    """The other callbacks; set by `arrange`."""

    resumed: Path | None = None
    """The checkpoint that the fit resumes from; known when its first epoch begins."""

    before_report: Callable[[Mapping[str, Any], int], None] | None = None
    """Called before each report, with its metrics and the number of finished epochs."""

    save_more: Callable[[Path], None] | None = None
    """Writes what a backend keeps beside the model, such as its random numbers. All ranks call it.
    """

    load_more: Callable[[Path], None] | None = None
    """Restores it before the first epoch of a fit that resumes."""

    def __init__(self) -> None:
        super().__init__()
        self._unreported: tuple[int, Mapping[str, Any]] | None = None

    @abstractmethod
    def report_epoch(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        """Report an epoch: the last of so many finished ones, those before a restart included."""

    @abstractmethod
    def progress(self, epochs: int) -> Progress:
        """Return the progress after this many finished epochs."""

    def reported_metrics(self, epochs: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what to report of the metrics of the last finished epoch, by name."""
        return metrics

    def why_not_within_epochs(self) -> str | None:
        """Return why this fit can't be resumed within an epoch; None if nothing is known."""
        return None

    def resumed_progress(self, epochs: int) -> Progress | None:
        """Return the progress that a fit resumes from after this many epochs; None in a new fit."""
        return None

    def arrange(self, given: MutableMapping[str, Any]) -> None:
        """Change the arguments of a `fit` that has this callback.

        This callback then handles an epoch's start before all others, and its end after all others.
        A fit that was over before a restart, perhaps ended by a callback, gets no more epochs.

        Raises:
            ValueError: another callback would load other weights after a restart.
        """
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in given["callbacks"]):
            raise ValueError(
                "callbacks: BackupAndRestore would load its own weights and epoch after a restart, "
                "in place of those of the run's checkpoint. Leave it out: the run's checkpoints do "
                "the same, and store the place in the data too."
            )
        if any(isinstance(each, _Begins) and each.one is self for each in given["callbacks"]):
            # It has been called already, by another replacement of `fit`.
            return
        # An earlier fit may have had this callback too.
        self.before_report = None
        self.others = [each for each in given["callbacks"] if each is not self]
        given["callbacks"] = [_Begins(self), *self.others, self]
        begins = given.get("initial_epoch", 0)
        before = self.resumed_progress(begins)
        if before is not None and (before.is_over or begins >= given.get("epochs", 1)):
            # With another number, Keras would once more replace the weights by those of `use_ema`.
            given["epochs"] = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._report_previous(is_last=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._unreported = (
            epoch + 1,
            {name: _as_number(value) for name, value in (logs or {}).items()},
        )

    def on_train_end(self, logs: Any = None) -> None:
        self._report_previous(is_last=True)

    def _report_previous(self, *, is_last: bool) -> None:
        if self._unreported is not None:
            (epochs, metrics), self._unreported = self._unreported, None
            reported = self.reported_metrics(epochs, metrics)
            if self.before_report is not None:
                self.before_report(reported, epochs)
            self.report_epoch(epochs, reported, is_last=is_last)


class _Begins(keras.callbacks.Callback):
    """Calls `on_epoch_begin` of another callback earlier than Keras does."""

    def __init__(self, one: EpochCallback) -> None:
        super().__init__()
        self.one = one

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.one.on_epoch_begin(epoch, logs)


def arrange_callbacks(given: MutableMapping[str, Any]) -> None:
    """Make a list of a fit's callbacks, and let those that report epochs arrange its arguments."""
    callbacks = given["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    # Keras also takes a single callback, and nested lists.
    given["callbacks"] = [] if callbacks is None else keras.tree.flatten(callbacks)
    for each in given["callbacks"]:
        if isinstance(each, EpochCallback):
            each.arrange(given)


def _as_number(value: Any) -> Any:
    """Return a metric as a float, or as a list with a float for each class."""
    if np.ndim(value) == 0:
        return float(value)
    return keras.ops.convert_to_numpy(value).tolist()
