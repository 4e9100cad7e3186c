"""Reports Keras's epochs when it is known which one is the last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np


class EpochCallback(keras.callbacks.Callback, ABC):
    """Reports an epoch when the next begins, or training ends.

    By then every callback has seen the end of the epoch, and may have ended training.

    Pass the arguments of `fit` through `arrange`, so that this callback comes before all others
    when an epoch begins. Otherwise a change that another callback makes then, such as a new
    learning rate, would be in the checkpoint, and be made again after a restart.
    """

    others: Sequence[Any] = ()
    """The other callbacks; set by `arrange`."""

    def __init__(self) -> None:
        super().__init__()
        self._unreported: tuple[int, Mapping[str, Any]] | None = None

    @abstractmethod
    def report_epoch(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        """Report an epoch that is over.

        Args:
            epochs: number of finished epochs, including those before a restart.
            metrics: of the last epoch.
            is_last: whether training has ended.
        """

    def is_over(self, epochs: int) -> bool:
        """Whether a callback had ended the fit after this number of epochs."""
        return False

    def arrange(self, given: MutableMapping[str, Any]) -> None:
        """Change the arguments of a `fit` that has this callback.

        This callback then begins epochs before all others, and ends them after all others. A fit
        that a callback had ended before a restart gets no more epochs.
        """
        self.others = [each for each in given["callbacks"] if each is not self]
        given["callbacks"] = [_Begins(self), *self.others, self]
        begins = given.get("initial_epoch", 0)
        if self.is_over(begins):
            given["epochs"] = begins

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
            self.report_epoch(epochs, metrics, is_last=is_last)


class _Begins(keras.callbacks.Callback):
    """Calls `on_epoch_begin` of another callback, which handles it once."""

    def __init__(self, one: EpochCallback) -> None:
        super().__init__()
        self._one = one

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._one.on_epoch_begin(epoch, logs)


def _as_number(value: Any) -> Any:
    """A metric as a number, or as a list with a number for each class."""
    if np.ndim(value) == 0:
        return float(value)
    return keras.ops.convert_to_numpy(value).tolist()
