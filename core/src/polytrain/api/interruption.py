"""The line that says how to resume a run after a signal has ended it, and with it the program."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass

from polytrain.api.result import Result
from polytrain.output.call_queues import CallQueues
from polytrain.output.queued_records import queued_records

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the same program needs to resume a run."""

    address: str
    """The run's directory or address."""

    new_name: str | None
    """The name that the run got because it was given none; without it, another run begins."""

    starts_over: bool
    """Whether `fit(resume="never")` was called."""

    def after(self, signal_name: str, result: Result | None, *, has_failed: bool) -> str:
        """Return the line.

        Args:
            result: the run's result; None if there is none, because it was ended at once.
            has_failed: whether the run has failed meanwhile.
        """
        if has_failed:
            shown = f"polytrain show {shlex.quote(self.address)}"
            state = f"the run has failed, see {shown!r}, and {signal_name} ends the program"
        elif result is not None and result.finished:
            return f"{self.address}: the run was finished when {signal_name} ended the program."
        else:
            state = f"stopped by {signal_name}"
        return f"{self.address}: {state}. {self._how(result)}"

    def _how(self, result: Result | None) -> str:
        again = "run the same script or cell again"
        if self.starts_over:
            return f'To start over, {again}; only fit(resume="auto") would resume the run.'
        if self.new_name is not None:
            again += f" with RunConfig(name={self.new_name!r})"
        if result is None:
            return f"To resume it, {again}; what came after its newest checkpoint is repeated."
        if result.checkpoint is None:
            return f"To start over, {again}: the run has no checkpoint."
        return f"To resume it from its newest checkpoint, {again}."


def warn(line: str) -> None:
    """Log a line after a run, without waiting long for a terminal or pipe that nobody reads."""
    with CallQueues() as queues, queued_records(queues):
        logger.warning("%s", line)
