"""The position of one rank in a data set while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from polytrain.data.plan import Plan, Remainder
from polytrain.data.position import DataPosition, resumed


class Epoch:
    """One iteration over a data set, which tells the cursor how far it has come."""

    def __init__(self, cursor: Cursor, number: int, start: int) -> None:
        self._cursor = cursor
        self.number = number
        self.start = start
        self.is_over = False

    def global_batches(self, batch_rows: int, remainder: Remainder) -> Iterator[range]:
        """The global batches that are left of the epoch, as ranges of positions."""
        start = self.start
        plan = self._cursor.plan
        while (stop := plan.batch_stop(start, batch_rows, remainder)) > start:
            yield range(start, stop)
            start = stop

    def given(self, stop: int) -> None:
        """Everything before this position has been given to the training function."""
        self._cursor._move(self, stop)

    def end(self) -> None:
        """Nothing more is given, whether or not there is more."""
        self._cursor._end(self)


class Cursor:
    """Where a rank stands: the epoch, and how much of it has been given.

    Of several iterations over the same data set at once, the one that began last counts.
    """

    def __init__(self, position: DataPosition) -> None:
        self._position = position
        self._begun: Epoch | None = None

    @property
    def plan(self) -> Plan:
        """The order of the data set's epochs."""
        return self._position.plan

    @property
    def position(self) -> DataPosition:
        """What a checkpoint that is made now records."""
        return self._position

    @property
    def has_moved(self) -> bool:
        """Whether there is anything to record."""
        return self._position.epoch > 0 or self._position.position > 0

    @property
    def next_start(self) -> int:
        """Where the next iteration will begin in its epoch."""
        return self._position.position if self._begun is None else 0

    def next_epoch(self) -> Epoch:
        """The epoch after the one that has begun, or the one to go on with after a restart.

        It begins when its first rows are given: until then it may be asked for again.
        """
        if self._begun is None:
            return Epoch(self, self._position.epoch, self._position.position)
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

    def _move(self, epoch: Epoch, position: int) -> None:
        if epoch.is_over:
            return
        if self._begun is not None and self._begun is not epoch:
            self._begun.is_over = True
        self._begun = epoch
        self._position = replace(self._position, epoch=epoch.number, position=position)

    def _end(self, epoch: Epoch) -> None:
        epoch.is_over = True
        if self._begun is epoch:
            self._position = replace(self._position, epoch=epoch.number + 1, position=0)
            self._begun = None


def cursor_at(name: str, plan: Plan, positions: Mapping[str, DataPosition]) -> Cursor:
    """A cursor for what is read by this plan, where a checkpoint says, or at the start.

    Raises:
        DataChangedError: the checkpoint's position means nothing by this plan.
    """
    position = positions.get(name)
    if position is None:
        return Cursor(DataPosition(plan=plan))
    return Cursor(resumed(name, position, plan))
