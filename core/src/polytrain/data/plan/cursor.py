"""Tracks one rank's place in a data set while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from polytrain.data.plan.position import DataPosition, StreamPosition
from polytrain.linux.progress_page import beat

_FEW = 3
"""Up to this many batches may have been only looked at."""

AnyPosition = TypeVar("AnyPosition", DataPosition, StreamPosition)


class Cursor(Generic[AnyPosition]):
    """A rank's position: the epoch, and the number of its rows that have been given.

    If several iterations over the data set run at once, the one that began last counts. A loop that
    continues after another one has begun is an error: a checkpoint has one position only.
    """

    def __init__(
        self,
        position: AnyPosition,
        *,
        skipped: Iterable[tuple[int, int, int]] = (),
        resumes: bool = False,
    ) -> None:
        """
        Args:
            position: the position to begin at.
            skipped: what is left out: an epoch, the first position, and the one after the last.
            resumes: whether the position is that of a checkpoint, from which an attempt resumes.
        """
        self._position: AnyPosition = position
        self._resumed: AnyPosition | None = position if resumes else None
        """The position of the checkpoint, until this attempt trains on the data.

        A loop that is left after its first batch, before any report, only looks at it, for example
        to see its shape: the training still resumes where the checkpoint was made.
        """

        self._looked_to: AnyPosition | None = None
        """The position after such a loop, in case it turns out to be the training."""

        self.was_read = False
        """Whether an iteration has begun."""

        self.passes = 0
        """Number of loops that are over, without looks at a first batch."""

        self._begun: Epoch | None = None
        self._skipped = tuple(skipped)
        self.begins_anywhere = False
        """Whether what reads by it can begin at any position, again and again."""

        self.skips = False
        """Whether what reads by it leaves out `Epoch.skipped`."""

        self._recorded: Epoch | None = None
        """The epoch in which a checkpoint has recorded the position, until that moves."""

        self._reported_at: AnyPosition = position
        self._looked_past: AnyPosition | None = None
        self.looked_past: AnyPosition | None = None
        """Where reading for the last report began, if the data were only looked at before."""

        self._has_reported = False
        self._was_left: Epoch | None = None
        """A loop that was left after a few batches since the last report, which says nothing."""

        self.look: Epoch | None = None
        """The latest such loop that another one has followed: it counts as an epoch."""

        self._is_left = False
        self.is_ambiguous = False
        """Whether a checkpoint has recorded a place in an epoch that was over for its loop.

        The loop was left, and its iterator was still there. This process has begun the next epoch
        since then; a restart from the checkpoint would read the rest of the one before.
        """

    @property
    def position(self) -> AnyPosition:
        """The position that a checkpoint records now."""
        return self._position

    def recorded(self) -> AnyPosition:
        """Return the position, for a checkpoint that is made now."""
        self._recorded, self._is_left = self._begun, False
        return self._position

    @property
    def may_be_looked_at(self) -> bool:
        """Whether the training has yet to resume: a look at the first batch doesn't count."""
        return self._resumed is not None

    def reported(self) -> None:
        """Note that the training function has taken a step, or reported.

        What it has read last, it has trained on.
        """
        if self._looked_to is not None:
            self._position = self._looked_to
        self._resumed = self._looked_to = self._was_left = None
        self.looked_past, self._looked_past = self._looked_past, None
        self._reported_at = self._position
        self._has_reported = True
        if self._begun is not None:
            self._begun.has_reported = True

    def next_epoch(self) -> Epoch:
        """Return the epoch after the one that has begun; after a restart, the interrupted one.

        It begins when its first rows are given. Until then it is returned again.
        """
        if self._begun is None:
            return Epoch(self, self._position.epoch, self._position.start)
        if self._resumed is not None and self._is_look(self._begun):
            return Epoch(self, self._resumed.epoch, self._resumed.start)
        return Epoch(self, self._position.epoch + 1, 0)

    @contextmanager
    def epoch(self) -> Iterator[Epoch]:
        """Begin the next epoch at once. It ends with the block.

        Raises:
            RuntimeError: this loop continues after another one has begun.
        """
        epoch = self.next_epoch()
        epoch.is_loop = True
        epoch.given(epoch.start)
        try:
            yield epoch
            epoch.check_alone()
            epoch.is_complete = True
            self._recorded = self._resumed = None
        finally:
            self._end(epoch)

    def skipped_in(self, epoch: int) -> tuple[range, ...]:
        """Return the positions that are left out in an epoch, in order, apart from each other."""
        holes: list[range] = []
        for _, first, stop in sorted(each for each in self._skipped if each[0] == epoch):
            if holes and first <= holes[-1].stop:
                holes[-1] = range(holes[-1].start, max(stop, holes[-1].stop))
            else:
                holes.append(range(first, stop))
        return tuple(holes)

    def resume_at(self, position: AnyPosition) -> None:
        """Set another position: before the first epoch, or in the one that has begun."""
        self._position = position

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has begun that isn't over."""
        return self._begun is not None

    def has_begun(self, epoch: Epoch) -> bool:
        """Return whether rows of this epoch have been given.

        If so, `next_epoch` returns the one after it.
        """
        return self._begun is epoch

    def move(self, epoch: Epoch, start: int) -> None:
        """Set the position within an epoch; see `Epoch.given`."""
        beat()
        if epoch.is_over:
            epoch.check_alone()
            return
        if self._begun is not epoch:
            if self._begun is not None:
                self._begun.is_over = self._begun.is_overtaken = True
                self._leave(self._begun)
                self._pass_over(self._begun, epoch.number, epoch.start)
            self.is_ambiguous |= self._is_left
        if self._begun is not epoch and self._was_left is not None:
            self.look, self._was_left = self._was_left, None
        self._begun, self._recorded = epoch, None
        self._looked_to = None
        self.was_read = True
        epoch.batches += start > epoch.start
        if epoch.batches > 1 or not epoch.is_loop:
            self._resumed = None
        self._position = self._position.moved(epoch.number, start)

    def end(self, epoch: Epoch) -> None:
        """End an epoch; see `Epoch.end`."""
        self._resumed = None
        self._end(epoch)

    def end_looked_ahead(self, epoch: Epoch) -> bool:
        """See `Epoch.end_looked_ahead`."""
        is_first = self._resumed is not None and self._begun is None
        if not (self.begins_anywhere and is_first and epoch.start):
            return False
        epoch.is_over = self.was_read = True
        self._looked_to = self._position.moved(epoch.number + 1, 0)
        return True

    def _end(self, epoch: Epoch) -> None:
        epoch.is_over = True
        if self._begun is not epoch:
            return
        self._leave(epoch)
        self.passes += epoch.is_loop and (epoch.batches > 1 or not self.begins_anywhere)
        after = self._position.moved(epoch.number + 1, 0)
        if self._resumed is not None and self._is_look(epoch):
            self._position, self._looked_to = self._resumed, after
        else:
            self._position = after
            self._pass_over(epoch, after.epoch, after.start)
            self._was_left = epoch if self._has_reported and epoch.may_be_look else None
        self._begun = None

    def _is_look(self, epoch: Epoch) -> bool:
        """Return whether an epoch before the training was a look at the first batch."""
        return self.begins_anywhere and epoch.is_loop

    def _pass_over(self, epoch: Epoch, number: int, start: int) -> None:
        """Leave a look out of what the next report is for, if nothing was read before it.

        Args:
            number: of the epoch that follows.
            start: its first position.
        """
        first = self._looked_past or self._reported_at
        if epoch.may_be_look and (epoch.number, epoch.start) == (first.epoch, first.start):
            self._looked_past = first.moved(number, start)

    def _leave(self, epoch: Epoch) -> None:
        """Note that an epoch is over, with or without rows left."""
        self._is_left |= epoch.is_loop and self._recorded is epoch


class Epoch:
    """One iteration over a data set, which moves the cursor."""

    def __init__(self, cursor: Cursor[Any], number: int, start: int) -> None:
        self._cursor = cursor
        self.number = number
        self.start = start
        self.batches = 0
        """Number of batches that were given."""
        self.is_over = False
        self.is_overtaken = False
        """Another epoch began before this one was over."""
        self.is_loop = False
        """The caller trains on each batch before it takes the next one, and wants all of them."""

        self.is_complete = False
        """The loop has taken all batches."""

        self.has_reported = False
        """The training function has reported in the loop."""

    @property
    def skipped(self) -> tuple[range, ...]:
        """The positions that are left out; see `Plan.global_batches`."""
        return self._cursor.skipped_in(self.number)

    @property
    def may_be_look(self) -> bool:
        """Whether a loop may have only looked at the first batches."""
        is_left = self.is_loop and not (self.is_complete or self.has_reported)
        return is_left and self.batches <= _FEW

    def check_alone(self) -> None:
        """Check that no other loop over the same data set has begun within this one.

        Raises:
            RuntimeError: one has begun.
        """
        if self.is_loop and self.is_overtaken:
            raise RuntimeError(
                "A data set was iterated over within a loop over the same one, which now "
                "continues: a checkpoint records one place in it, and after a restart would leave "
                "out the rest of the outer loop. Pass the data once more under another name, as in "
                'datasets={"train": data, "again": data}, for the inner loop'
            )

    def given(self, start: int) -> None:
        """Count all rows before this position as given to the training function."""
        self._cursor.move(self, start)

    def end(self) -> None:
        """End the epoch, whether or not rows are left."""
        self._cursor.end(self)

    def end_looked_ahead(self) -> bool:
        """End the epoch if it may only have been looked at; return whether that is so.

        Nobody has said what its rows, all taken ahead, were used for. After a restart the rest of
        an interrupted epoch may be so short that a look at its first batch takes all of it. It
        counts as trained on once the training function reports.
        """
        return self._cursor.end_looked_ahead(self)
