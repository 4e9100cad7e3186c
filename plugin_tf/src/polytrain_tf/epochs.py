"""Keras's epochs, one at a time, when it is known which was the last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np


class EpochCallback(keras.callbacks.Callback, ABC):  # type: ignore[misc]  # keras has no types
    """Tells of an epoch when the next begins, or training ends.

    By then every callback has seen the epoch's end, and whether it ended training shows.

    `fit` has to be given what `arrange` makes of its arguments: what others do as the next epoch
    begins, such as setting its learning rate, would be done once more by whoever resumes from here.
    """

    others: Sequence[Any] = ()
    """The callbacks beside it, once they are arranged."""

    def __init__(self) -> None:
        super().__init__()
        self._unreported: tuple[int, Mapping[str, Any]] | None = None

    @abstractmethod
    def tell(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        """An epoch is over.

        Args:
            epochs: that are done, those before a restart included.
            metrics: of the last of them.
            is_last: whether training has ended with it.
        """

    def is_over(self, epochs: int) -> bool:
        """Whether a fit that was to go on after so many epochs had been ended by a callback."""
        return False

    def arrange(self, given: MutableMapping[str, Any]) -> None:
        """Change the arguments of a `fit` that has this callback.

        It begins epochs before all others then, and ends them after all others. A fit that had been
        ended before a restart has no epochs left.
        """
        self.others = [each for each in given["callbacks"] if each is not self]
        given["callbacks"] = [_Begins(self), *self.others, self]
        begins = given.get("initial_epoch", 0)
        if self.is_over(begins):
            given["epochs"] = begins

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._tell(is_last=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._unreported = (
            epoch + 1,
            {name: _plain(value) for name, value in (logs or {}).items()},
        )

    def on_train_end(self, logs: Any = None) -> None:
        self._tell(is_last=True)

    def _tell(self, *, is_last: bool) -> None:
        if self._unreported is not None:
            (epochs, metrics), self._unreported = self._unreported, None
            self.tell(epochs, metrics, is_last=is_last)


class _Begins(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Has another callback begin an epoch, which it does once."""

    def __init__(self, one: EpochCallback) -> None:
        super().__init__()
        self._one = one

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._one.on_epoch_begin(epoch, logs)


def _plain(value: Any) -> Any:
    """A metric as a number, or as a list of them if it has one for each class."""
    if np.ndim(value) == 0:
        return float(value)
    return keras.ops.convert_to_numpy(value).tolist()
