"""Which of a training function's calls has made a checkpoint: a restart makes the same ones."""

from __future__ import annotations

from polytrain import get_context
from polytrain.workers.context import Context


class Calls:
    """Counts those of one kind in each attempt."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._count = 0

    def next(self) -> int:
        """The number of the call that is made now, from 1."""
        context = get_context()
        # Without workers an attempt isn't a process.
        self._count = self._count + 1 if self._context is context else 1
        self._context = context
        return self._count
