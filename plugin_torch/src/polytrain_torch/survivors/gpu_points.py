"""Which clean point a GPU is at, that the training may have passed on the CPU long before.

The CPU only queues what the GPU computes. The GPU is at a point once it has done all that was
queued before it, and until the gradients of the step that follows have arrived. If a rank is lost,
they never do: the parameters stay those of the point, although the CPU may wait several lines later
for the loss of that step, or may even have queued the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from polytrain.extension import NotCleanError

_MOST = 4
"""Number of points that the GPU may be behind: fewer than states are kept of."""


class Point(Protocol):
    """A clean point."""

    @property
    def number(self) -> int:
        """Its number in the attempt."""


PointT = TypeVar("PointT", bound=Point)


class Event(Protocol):
    """A place in the GPU's queue, as `torch.cuda.Event` is."""

    def query(self) -> bool:
        """Return whether the GPU has done all that was queued before it."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(slots=True)
class _Passed(Generic[PointT]):
    point: PointT
    reached: Event
    left: Event | None = None
    """The gradients of the step after it have arrived; None if that step isn't queued."""

    versions: Sequence[int] = ()
    """Those of the parameters when the step was queued."""


class GpuPoints(Generic[PointT]):
    """The last points that the training has passed on the CPU."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        """
        Args:
            mark: returns an `Event` at the end of the GPU's queue.
        """
        self._mark = mark
        self._passed: deque[_Passed[PointT]] = deque()

    def wait(self) -> None:
        """Wait while the GPU is too many points behind. Another thread may look meanwhile."""
        if len(self._passed) == _MOST and (left := self._passed[0].left) is not None:
            # Until then the GPU may be at that point.
            left.synchronize()

    def reach(self, point: PointT) -> None:
        """Note that all that comes before a point is queued."""
        if len(self._passed) == _MOST:
            self._passed.popleft()
        self._passed.append(_Passed(point, self._mark()))

    def amend(self, point: PointT) -> None:
        """Note that more is known of the last point, before a step follows it."""
        self._passed[-1].point, self._passed[-1].reached = point, self._mark()

    def leave(self, versions: Sequence[int]) -> None:
        """Note that an optimizer's step is about to be queued.

        Args:
            versions: those of the parameters before it.
        """
        left = None
        for each in self._passed:
            if each.left is None:
                left = self._mark() if left is None else left
                each.left, each.versions = left, versions

    def current(self) -> PointT | None:
        """Return the point that the GPU is at; None while it is on its way to the next one."""
        for each in reversed(self._passed):
            if each.reached.query():
                return each.point if each.left is None or not each.left.query() else None
        return None

    def versions_after(self, number: int) -> Sequence[int] | None:
        """Return the parameters' versions when the step after a point was queued; None if none was.

        Args:
            number: the point's number.

        Raises:
            NotCleanError: the point was too long ago.
        """
        found = next((each for each in self._passed if each.point.number == number), None)
        if found is None:
            raise NotCleanError("it has made too many reports since the state that its GPU had")
        return None if found.left is None else found.versions
