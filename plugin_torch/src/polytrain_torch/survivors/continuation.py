"""Whether a restarted training function would continue from a clean point as this one does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from polytrain.extension import KeptStates, NotCleanError, Survivor
from polytrain_torch.survivors.byte_code import instruction_of
from polytrain_torch.survivors.clean_points import CleanPoint
from polytrain_torch.survivors.loop_variables import Frames, Loop, fetch_of_step, frames_from


class Continuation:
    """What has been found of the training function, beside the parts of its state."""

    def __init__(
        self,
        survivor: Survivor,
        *,
        known: Callable[[], Sequence[Any]],
        carried: Callable[[], str | None],
    ) -> None:
        """
        Args:
            survivor: this rank's session.
            known: returns the objects that checkpoints hold, or that rebuild themselves.
            carried: returns what has changed beside the parts, and a restart wouldn't find; None
                if nothing.
        """
        self._survivor = survivor
        self.known = known
        self._carried = carried
        self._reads_before = survivor.reads_checkpoint
        self.why_elsewhere = "it gets its batches from elsewhere"
        """Why a loop can't be continued whose batches come from no loader with a place."""

        self.why_not = ""
        """What has been found that a checkpoint wouldn't hold; empty if nothing."""

        self._loop: Loop | None = None
        self._first_point = 0
        """Number of the first point after the step at which the loop was looked at."""

        self._frames: Frames = ()
        self._at: tuple[FrameType, int] | None = None
        """The frame that fetched last, and where it was, if `_frames` are that fetch's."""

        self._of_loop: Frames | None = None
        """The last frames that were found to be the loop's."""

        self._fetches: dict[tuple[CodeType, int], Frames] = {}
        """Where batches were fetched before the first step: looks, evaluations, the training."""

        self._entered: dict[tuple[CodeType, int], Loop] = {}
        """The variables when a batch was first fetched at each of these places."""

        self._second: Loop | None = None
        """The variables at the second step, or a later one if the loop wasn't known to be there.

        Some change, and come back to what they were at the first step: a counter up to a limit, or
        what alternates. A loop that raises them before its step has the same value at the fetch
        before another step.
        """

        self._begin: Loop | None = None
        """The variables when the loop fetched its first batch; None once no point needs them."""

        self._last_of_first = 0
        """Number of the last point before the loop's second step."""

    def is_of_loop(self, point: CleanPoint) -> bool:
        """Return whether a point is where the loop fetches its batches; an evaluation's isn't."""
        if self._loop is None or point.frames is None:
            return False
        return self._loop.is_at(point.frames)

    def is_elsewhere(self, frames: Frames) -> bool:
        """Return whether a fetch of a batch is another one than the loop's."""
        if self._loop is None or frames is self._of_loop:
            return False
        is_loop = self._loop.is_at(frames)
        if is_loop:
            self._of_loop = frames
        return not is_loop

    def refuse(self, why: str) -> None:
        """Note that a checkpoint can't hold the state from here on."""
        self.why_not = self.why_not or why

    @property
    def has_fetched(self) -> bool:
        """Whether a loop has fetched a batch at a point."""
        return bool(self._frames)

    def fetch(self, frame: FrameType | None) -> None:
        """Note that a loop fetches a batch. Before the first step, nobody knows which loop trains.

        Args:
            frame: the loop's, or that of what it calls.
        """
        if frame is None or self._loop is not None or self.why_not:
            return
        place, frames = (frame.f_code, instruction_of(frame)), frames_from(frame)
        if place not in self._fetches:
            # Variables may be anything. If they can't be looked at, the first step tells.
            with contextlib.suppress(Exception):
                self._entered[place] = Loop(frames, self.known())
        self._fetches[place] = frames

    def frames_at(self, frame: FrameType | None) -> Frames:
        """Return the frames of a fetch, from that frame outwards."""
        at = None if frame is None else (frame, frame.f_lasti)
        if at is None or at != self._at:
            self._at, self._frames = at, frames_from(frame)
        return self._frames

    def see_loop(self, next_point: int) -> None:
        """Look at the variables of the loop that takes the first step, and at the second again.

        Args:
            next_point: number of the point that comes after this step.
        """
        if self.why_not or self._second is not None:
            return
        if self._loop is not None:
            self._see_again(self._loop, next_point)
            return
        self._first_point = next_point
        try:
            found = fetch_of_step(self._fetches.values())
            self._fetches.clear()
            if found is None:
                self.refuse(self.why_elsewhere)
            else:
                fetching, at = found[0]
                self._begin = self._entered.get((fetching.f_code, at))
                self._at, self._frames = None, found
                self._loop = Loop(found, self.known())
            self._entered.clear()
        except Exception as error:  # variables and states may be anything
            self.refuse(f"its variables can't be looked at: {type(error).__name__}: {error}")

    def _see_again(self, loop: Loop, next_point: int) -> None:
        # Optimizers may step in turn, and an evaluation may have fetched batches since.
        if next_point > self._first_point and loop.is_at(self._frames):
            # If they can't be looked at now, they are compared with the first fetch's.
            with contextlib.suppress(Exception):
                self._second = Loop(self._frames, self.known())

    def pass_point(self, point: CleanPoint) -> None:
        """Note a point. What the first step began with is held only while its state may be asked.

        A GPU may be at an earlier point than this process.
        """
        if point.first <= self._first_point:
            self._last_of_first = point.number
        elif self._second and point.number >= self._last_of_first + KeptStates.POINTS:
            self._begin = None

    def expect_possible(self, point: CleanPoint) -> None:
        """
        Raises:
            NotCleanError: a restart can't continue from the point, whatever the loop has there.
        """
        if point.number == 1:
            raise NotCleanError("it has taken no step since it started")
        if self.why_not:
            raise NotCleanError(self.why_not)
        if self._survivor.reads_checkpoint != self._reads_before:
            raise NotCleanError("the training function reads its checkpoint itself")

    def shows_carried(self, point: CleanPoint) -> bool:
        """
        Return whether a comparison with the first steps would show what a loop carries to a point.

        After the first one it wouldn't: a counter that is raised before it has the same value.
        Only a comparison with the fetch of the first batch shows it, and shows also what a loop
        sets once, in its first step.
        """
        return point.frames is None or point.first > self._first_point

    def expect_nothing_carried(self, point: CleanPoint) -> None:
        """
        Raises:
            NotCleanError: at the point there was something that a restart wouldn't find.
        """
        carried = self._carried() or self._carried_by_loop(point)
        if carried is not None:
            raise NotCleanError(carried)

    def _carried_by_loop(self, point: CleanPoint) -> str | None:
        """Return what a loop has changed by a point, which a restart wouldn't find, if anything."""
        if point.frames is None:
            return None
        shows = self.shows_carried(point)
        other = (self._second or self._begin) if shows else self._begin
        if self._loop is None or other is None or not other.frames:
            return "its loop isn't known"
        carried = self._loop.carried(
            point.frames, point.progress, has_batch=not point.is_over, other=other
        )
        if carried is None or shows:
            return carried
        return f"it has taken one step since it started, and {carried}"
