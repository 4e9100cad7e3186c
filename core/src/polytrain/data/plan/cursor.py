"""The position of one rank in a data set while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from polytrain.data.plan.position import Position
from polytrain.linux.progress_page import beat

AnyPosition = TypeVar("AnyPosition", bound=Position)


class Cursor(Generic[AnyPosition]):
    """Where a rank stands: the epoch, and how much of it has been given.

    Of several iterations over the same data set at once, the one that began last counts. A loop
    that goes on after another one has begun is an error: a checkpoint knows one place only.
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
        """Begin the next epoch at once. However the block is left, it is over then.

        Raises:
            RuntimeError: another epoch has begun, and this one goes on.
        """
        epoch = self.next_epoch()
        epoch.given(epoch.start)
        epoch.is_loop = True
        try:
            yield epoch
            epoch.check_alone()
        finally:
            epoch.end()

    def resume_at(self, position: AnyPosition) -> None:
        """Before the first epoch: begin at another position than the checkpoint's manifest has."""
        self._position = position

    def has_begun(self, epoch: Epoch) -> bool:
        """Whether an epoch is the one of which something has been given."""
        return self._begun is epoch

    def move(self, epoch: Epoch, start: int) -> None:
        """An epoch has come this far."""
        beat()
        if epoch.is_over:
            epoch.check_alone()
            return
        if self._begun is not None and self._begun is not epoch:
            self._begun.is_over = self._begun.is_overtaken = True
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
        self.is_overtaken = False
        """Another one began before this one was over."""
        self.is_loop = False
        """Whoever takes rows has trained on those before, and wants all of them."""

    @property
    def has_begun(self) -> bool:
        """Whether something has been given of it, so that it won't be asked for again."""
        return self._cursor.has_begun(self)

    def check_alone(self) -> None:
        """Check that no other loop over the same data set has begun within this one.

        Raises:
            RuntimeError: one has begun.
        """
        if self.is_loop and self.is_overtaken:
            raise RuntimeError(
                "A data set was iterated over within a loop over the same one, which now goes on: "
                "a checkpoint records one place in it, and after a restart would leave out the "
                "rest of the outer loop. Pass the data once more under another name, as in "
                'datasets={"train": data, "again": data}, for the inner loop'
            )

    def given(self, start: int) -> None:
        """Everything before this place has been given to the training function."""
        self._cursor.move(self, start)

    def end(self) -> None:
        """Nothing more is given, whether or not there is more."""
        self._cursor.end(self)
