"""The clean points that a training passes, and the one that its state is at.

A clean point is the first fetch of a batch after a step, or a report of `TrainingState`, or where a
library's trainer may save. From there until the next `optimizer.step` the parameters stay what they
are. The training notes where it is, and the thread of a survivor keeps it there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polytrain.extension import KeptStates, NotCleanError, Place
from polytrain_torch.survivors.gpu_points import GpuPoints
from polytrain_torch.survivors.live_parts import OnCpu, Sample
from polytrain_torch.survivors.loop_variables import Frames

_SETTLED_S = 0.02
"""A training that has stood still for so long at a point waits for the lost rank."""

_STUCK_S = 0.2
"""On a GPU, so long may the gradients of a step take that only this rank has queued."""

_NAP_S = 0.001

_STEPS = "it was inside of an optimizer's step"


@dataclass(slots=True, kw_only=True)
class CleanPoint:
    """What is known of a clean point beside the small state.

    Nobody changes it. It isn't frozen: one is made in each step, and that takes four times as long.
    """

    number: int
    first: int
    """Number of the first point after the same step."""

    place: Place
    versions: Sequence[int]
    """The version of each parameter: it changes with every write."""

    frames: Frames | None
    """The loop's; None at a report and in a library's loop, which can continue there."""

    progress: Mapping[str, Any]
    is_over: bool = False
    """Whether the epoch had no batch left."""

    is_whole: bool = False
    """Whether a restart would have found all variables of the loop here, which may change since."""

    sample: Sample | None = None
    """Of the parameters: an evaluation may swap them, or a step change them for a while. None if
    nobody asks for the state later."""

    of_library: Any = None
    """What a library's trainer knows here; None in the user's own loop."""

    on_cpu: OnCpu = ()
    """With parameters on a GPU, what of the optimizers' states is on the CPU."""


class CleanPoints:
    """Where the training is. A survivor's thread may ask, and keep it there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_dirty = True
        self._proves_clean: Callable[[], bool] = lambda: True
        self._is_held = False
        self.last: CleanPoint | None = None
        """The last point that the training has passed."""

        self._passed_at = 0.0
        """When it has passed that, in monotonic seconds."""

        self._after_step: deque[CleanPoint] = deque(maxlen=KeptStates.POINTS)
        """The last points since a step, which have the same parameters, and small states."""

        self.has_stepped = False
        """Whether an optimizer has stepped since then."""

        self.why_dirty = _STEPS
        """What has kept the training from a point since then."""

        self.on_gpu: GpuPoints[CleanPoint] | None = None
        """Which point the GPU is at; None if the parameters are on the CPU."""

    @property
    def next_number(self) -> int:
        """The number of the next point."""
        return 1 if self.last is None else self.last.number + 1

    # Called by the training

    def leave(self, versions: Callable[[], Sequence[int]]) -> None:
        """Note that an optimizer is about to change the parameters; wait for ever if they are held.

        Args:
            versions: returns the version of each parameter.

        Raises:
            Exception: a GPU can't take it. Nobody would see that it leaves the point.
        """
        with self._lock:
            is_held = self._is_held
            if not is_held:
                self._is_dirty = self.has_stepped = True
                self.why_dirty = _STEPS
                if self.on_gpu is not None:
                    self.on_gpu.leave(versions())
        if is_held:
            # The agent kills this process: its state belongs to the next attempt.
            threading.Event().wait()

    def reach(self, point: CleanPoint, proves_clean: Callable[[], bool]) -> bool:
        """Note a point; return whether an optimizer has stepped since the last one.

        Args:
            point: where the training is.
            proves_clean: tells, when the state is asked for, whether the point was clean.

        Raises:
            Exception: a GPU can't take it.
        """
        if self.on_gpu is not None:
            self.on_gpu.wait()
        with self._lock:
            has_stepped = self.has_stepped
            if self.on_gpu is not None:
                self.on_gpu.reach(point)
            if has_stepped:
                self._after_step.clear()
            self._after_step.append(point)
            self.last, self._passed_at = point, time.monotonic()
            self._proves_clean = proves_clean
            self._is_dirty = self.has_stepped = False
        return has_stepped

    def amend(self, point: CleanPoint) -> None:
        """Note that more is known of the last point.

        Raises:
            Exception: a GPU can't take it.
        """
        with self._lock:
            self.last = self._after_step[-1] = point
            if self.on_gpu is not None:
                self.on_gpu.amend(point)

    # Called by whoever writes a state

    def hold(self, number: int, has_time: Callable[[], bool]) -> CleanPoint | None:
        """Keep the training at a point; return it, or None if there is none.

        Args:
            number: wait for this point, while there is time.
            has_time: whether there is time left to wait.
        """
        seen, since = -1, 0.0
        while True:
            is_late = not has_time()
            with self._lock:
                point = self._current()
                at = -1 if point is None else point.number
                if at != seen:
                    # A GPU comes to a point later than this process.
                    seen, since = at, self._passed_at if self.on_gpu is None else time.monotonic()
                stands_s = time.monotonic() - since
                is_stuck = self.on_gpu is not None and stands_s > _STUCK_S
                has_settled = (at >= number and stands_s > _SETTLED_S) or is_stuck
                if point is not None and (has_settled or is_late):
                    self._is_held = True
                    return point
            if is_late:
                return None
            time.sleep(_NAP_S)

    def before(self, point: CleanPoint) -> Sequence[CleanPoint]:
        """Return earlier points after the same step as a point, newest first.

        Those in a user's own loop are left out if its variables there aren't known to be whole.
        """
        with self._lock:
            known = reversed(self._after_step)
            return [
                each
                for each in known
                if point.first <= each.number < point.number
                and (each.frames is None or each.is_whole)
            ]

    def versions_after(self, point: CleanPoint) -> Sequence[int] | None:
        """Return the parameters' versions when the GPU's next step was queued; None if none was.

        Raises:
            NotCleanError: the point was too long ago.
        """
        with self._lock:
            return None if self.on_gpu is None else self.on_gpu.versions_after(point.number)

    def expect_gpu_at(self, point: CleanPoint) -> None:
        """
        Raises:
            NotCleanError: there is a GPU, and it has left the point.
        """
        with self._lock:
            now = self._current()
        if self.on_gpu is not None and (now is None or now.number != point.number):
            raise NotCleanError("its GPU began the next step while its state was copied")

    def _current(self) -> CleanPoint | None:
        """Return the point whose state there is; None during an optimizer's step."""
        if self.on_gpu is not None:
            return self.on_gpu.current()
        return None if self._is_dirty or not self._proves_clean() else self.last
