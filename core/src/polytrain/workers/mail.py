"""What an agent tells the controller: in order, and together where that is cheaper."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from polytrain.run.events import Reported
from polytrain.workers.group import Happening

_REPORTS_TOGETHER_S = 0.1


class Mail:
    """A queue of what happens, taken in batches.

    Everything goes at once, but for reports that closely follow others. A delivery costs a
    millisecond of CPU time, which trainers that use all cores pay for, and nobody looks at metrics
    more often than this.
    """

    def __init__(self, reports_together_s: float = _REPORTS_TOGETHER_S) -> None:
        """
        Args:
            reports_together_s: how long a report may wait after others have gone.
        """
        self._reports_together_s = reports_together_s
        self._waiting: asyncio.Queue[Happening] = asyncio.Queue()
        self._is_urgent = asyncio.Event()

    def put(self, happening: Happening) -> None:
        """Tell something. Only on the event loop's thread."""
        self._waiting.put_nowait(happening)
        if not isinstance(happening, Reported):
            self._is_urgent.set()

    async def batches(self) -> AsyncIterator[list[Happening]]:
        """Everything, in order; what is ready together comes together."""
        while True:
            batch = [await self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            self._is_urgent.clear()
            yield batch
            if all(isinstance(happening, Reported) for happening in batch):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_urgent.wait(), self._reports_together_s)
