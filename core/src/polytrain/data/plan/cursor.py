"""The position of one rank in a data set while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from polytrain.data.plan.position import Position
from polytrain.monitoring.progress_page import beat

AnyPosition = TypeVar("AnyPosition", bound=Position)


class Cursor(Generic[AnyPosition]):
    """Where a rank stands: the epoch, and how much of it has been given.

    Of several iterations over the same data set at once, the one that began last counts.
    """

    def __init__(self, position: AnyPosition) -> None:
        self._position = position
        self._begun: Epoch | None = None

    @property
    def position(self) -> AnyPosition:
        """What a checkpoint that is made now records."""
        return self._position

    @property
    def next_start(self) -> int:
        """Where the next iteration will begin in its epoch."""
        return self._position.start if self._begun is None else 0

    def next_epoch(self) -> Epoch:
        """The epoch after the one that has begun, or the one to go on with after a restart.

        It begins when its first rows are given: until then it may be asked for again.
        """
        if self._begun is None:
            return Epoch(self, self._position.epoch, self._position.start)
        return Epoch(self, self._position.epoch + 1, 0)

    @contextmanager
    def epoch(self) -> Iterator[Epoch]:
        """Begin the next epoch at once. However the block is left, it is over then."""
        epoch = self.next_epoch()
        epoch.given(epoch.start)
        try:
            yield epoch
        finally:
            epoch.end()

    def move(self, epoch: Epoch, start: int) -> None:
        """An epoch has come this far."""
        beat()
        if epoch.is_over:
            return
        if self._begun is not None and self._begun is not epoch:
            self._begun.is_over = True
        self._begun = epoch
        self._position = self._position.moved(epoch.number, start)

    def end(self, epoch: Epoch) -> None:
        """Nothing more is given of an epoch."""
        epoch.is_over = True
        if self._begun is epoch:
            self._position = self._position.moved(epoch.number + 1, 0)
            self._begun = None


class Epoch:
    """One iteration over a data set, which tells the cursor how far it has come."""

    def __init__(self, cursor: Cursor[Any], number: int, start: int) -> None:
        self._cursor = cursor
        self.number = number
        self.start = start
        self.is_over = False

    def given(self, start: int) -> None:
        """Everything before this place has been given to the training function."""
        self._cursor.move(self, start)

    def end(self) -> None:
        """Nothing more is given, whether or not there is more."""
        self._cursor.end(self)
