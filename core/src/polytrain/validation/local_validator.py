"""Validates checkpoints on the driver's machine: a zygote forks a process for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from polytrain.events.output import Output
from polytrain.validation.validator import (
    NotValidated,
    Validated,
    ValidationTask,
    bounded_threads,
    task_message,
)
from polytrain.workers.processes.channel import Message
from polytrain.workers.processes.pool import Ended, ProcessPool, Sent, Wrote
from polytrain.workers.processes.zygote_connection import ZygoteSpec

_ENTRY = "polytrain.validation.validator"

_KILL_TIMEOUT_S = 60.0
"""Seconds that a killed process may take to end, and to free its memory."""


class LocalValidator:
    """A `Validator` whose processes die with the driver."""

    def __init__(
        self,
        function: bytes,
        zygote: ZygoteSpec,
        *,
        environment: Mapping[str, str],
        directory: str,
        threads: int,
        tell: Callable[[Output], None],
        leave_timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            function: the pickled validation function.
            zygote: forks the processes, with its address on this node; they get its `variables`.
            environment: their variables besides.
            directory: the driver's working directory.
            threads: number of threads that libraries may start, unless `zygote.variables` set it.
            tell: called with the processes' output, from the thread that calls `validate`.
            leave_timeout_s: seconds that a process may take to end once the function has returned.
        """
        self._function = function
        self._tell = tell
        self._leave_timeout_s = leave_timeout_s
        self._bounds = bounded_threads(threads, unless=zygote.variables)
        self._processes = ProcessPool(
            zygote,
            _ENTRY,
            environment={**environment, **self._bounds, **zygote.variables},
            directory=directory,
            captures_output=True,
        )
        self._is_cancelled = threading.Event()
        self._number = 0

    def validate(self, task: ValidationTask) -> Validated | NotValidated | None:
        self._number += 1
        try:
            message = task_message(self._function, task, self._bounds)
            self._processes.start(self._number, message)
        except OSError as error:
            return NotValidated(reason=f"its process can't be started: {error}")
        outcome, ended, timed_out = self._wait_for_end(task.timeout_s)
        if outcome is not None:
            return outcome
        if timed_out:
            reason = f"it took more than timeout_s={task.timeout_s:g} seconds, and was killed"
            return NotValidated(reason=reason, timed_out=True)
        return None if self._is_cancelled.is_set() else _death(ended)

    def cancel(self) -> None:
        self._is_cancelled.set()
        self._processes.wake()

    def close(self) -> None:
        self._processes.close()

    def _wait_for_end(
        self, timeout_s: float | None
    ) -> tuple[Validated | NotValidated | None, Ended, bool]:
        """Wait until the process is gone; kill it after a timeout.

        Returns:
            The outcome that it has sent, its end, and whether it took too long.
        """
        outcome: Validated | NotValidated | None = None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_killed = timed_out = False
        while True:
            is_late = deadline is not None and time.monotonic() >= deadline
            timed_out = timed_out or is_late
            if is_killed and is_late:
                how = f"hasn't ended {_KILL_TIMEOUT_S:g} s after SIGKILL"
                self._processes.count_as_ended(self._number, how)
                deadline = None
            elif not is_killed and (timed_out or self._is_cancelled.is_set()):
                is_killed, deadline = True, time.monotonic() + _KILL_TIMEOUT_S
                self._processes.kill(self._number)
            # No time limit if the user has set none: a lost process also ends.
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            match self._processes.next(left_s):
                case Ended(number=number) as ended if number == self._number:
                    return outcome, ended, timed_out
                case Sent(number=number, message=message) if number == self._number:
                    outcome = _outcome(message)
                    deadline = time.monotonic() + self._leave_timeout_s
                case Wrote(stream=stream, text=text):
                    self._tell(Output(attempt=0, rank=None, stream=stream, text=text))


def _death(ended: Ended) -> NotValidated:
    """Return the outcome for a process that has sent none."""
    memory = ", as the kernel was out of memory," if ended.lacked_memory else ""
    how = f"was {ended.how}" if ended.how.startswith("killed") else ended.how
    return NotValidated(
        reason=f"its process {how}{memory} before it returned", output=ended.last_words
    )


def _outcome(message: Message) -> Validated | NotValidated:
    match message:
        case ["validated", metrics]:
            return Validated(metrics=metrics)
        case ["raised", summary, text, pickled, _]:
            return NotValidated(reason=summary, traceback=text, error=pickled)
    raise ValueError(f"unknown message {message[:1]}")
