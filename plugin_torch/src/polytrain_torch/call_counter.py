"""Which of a training function's calls has made a checkpoint: a restart makes the same ones."""

from __future__ import annotations

from polytrain import get_context
from polytrain.extension import Context


class Calls:
    """Counts those of one function in each attempt."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._context: Context | None = None
        self._count = 0

    def next(self) -> int:
        """The number of the call that is made now, from 1."""
        context = get_context()
        # Without workers an attempt isn't a process.
        self._count = self._count + 1 if self._context is context else 1
        self._context = context
        return self._count

    def resumes(self, call: int, *, made_by: int) -> bool:
        """Whether a call resumes from the checkpoint that one has made: a later one begins.

        Raises:
            ValueError: it was an earlier call.
        """
        if call < made_by:
            raise ValueError(
                f"This is {self._function} number {call} of the training function, and the newest "
                f"checkpoint is of number {made_by}: what the earlier one has trained isn't kept. "
                "Give each a run of its own, and the next one the model by restore_from."
            )
        return call == made_by
