"""Counts calls of a function, so that after a restart the call that saved a checkpoint resumes."""

from __future__ import annotations

from polytrain.workers.session.context import Context
from polytrain.workers.session.worker_api import get_context


class Calls:
    """Counts the calls of one function in each attempt."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._context: Context | None = None
        self._count = 0

    def next(self) -> int:
        """Count a call, and return its number, from 1."""
        self._count = self.upcoming()
        self._context = get_context()
        return self._count

    def upcoming(self) -> int:
        """The number of the next call."""
        # In an inline run, several attempts share a process.
        return self._count + 1 if self._context is get_context() else 1

    def resumes(self, call: int, *, made_by: int) -> bool:
        """Return whether a call resumes from a checkpoint. A later call starts fresh.

        Args:
            call: number of the call.
            made_by: number of the call that saved the checkpoint.

        Raises:
            ValueError: a later call saved the checkpoint.
        """
        if call < made_by:
            raise ValueError(
                f"This is {self._function} number {call} of the training function, and number "
                f"{made_by} saved the newest checkpoint: the result of number {call} isn't in it. "
                "Give each call its own run, and pass the model on with restore_from."
            )
        return call == made_by
