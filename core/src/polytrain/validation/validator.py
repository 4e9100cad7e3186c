"""A call of a run's validation function, its outcome, and the process that makes it."""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.events.output import flush_output
from polytrain.functions.pickling import THIS_MACHINE, note_unreadable, pickled_error, unpickled
from polytrain.text.metrics import plain_metrics
from polytrain.workers.processes.channel import Message, SocketChannel
from polytrain.workers.session.raised_errors import raised_message
from polytrain_plugins.type_names import a_type

_OPENMP = "OMP_NUM_THREADS"

_LIBRARIES = (_OPENMP, "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationTask:
    """One call of the validation function."""

    checkpoint: Checkpoint
    fn_kwargs: Mapping[str, Any]
    timeout_s: float | None
    """Maximum seconds that it may take; None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """The function has returned these metrics."""

    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotValidated:
    """The function has returned no metrics."""

    reason: str
    """One line: the exception's type and text, or a description of the process's end."""

    traceback: str = ""
    """The function's own traceback, as Python prints it; empty if there is none."""

    error: bytes | None = None
    """The pickled exception, if it can be pickled."""

    output: str = ""
    """The last lines of the process's standard error, if it couldn't send an exception."""

    timed_out: bool = False


class Validator(Protocol):
    """Calls a run's validation function in a separate process."""

    def validate(self, task: ValidationTask) -> Validated | NotValidated | None:
        """Call the function, and wait for its outcome; return None if it was cancelled."""

    def cancel(self) -> None:
        """Cancel the running call, and all later ones. Any thread may call this."""

    def close(self) -> None:
        """Release everything, after the last call has ended."""


def call(
    pickled: bytes,
    task: ValidationTask,
    references: Sequence[Any] = (),
    *,
    host: str = THIS_MACHINE,
) -> dict[str, Any]:
    """Call a pickled validation function in this process, and return its metrics.

    Args:
        pickled: the function.
        task: the call's arguments.
        references: references to Ray objects, which `pickled_for_ray` has left out.
        host: the address of this process's node.

    Raises:
        TypeError: it doesn't return a dict of metrics.
        Exception: any exception of the function.
    """
    try:
        function = unpickled(pickled, references)
    except Exception as error:
        note_unreadable(error, "The validation function", host)
        raise
    returned: Any = function(task.checkpoint, **task.fn_kwargs)
    if not isinstance(returned, Mapping):
        raise TypeError(
            "The validation function must return a dict of metrics, and has returned "
            f"{a_type(returned)}."
        )
    return plain_metrics(returned)


def bounded_threads(threads: int, *, unless: Container[str]) -> dict[str, str]:
    """Return the variables that bound the libraries' number of threads.

    Args:
        threads: maximum number of threads.
        unless: names of variables that are already set.
    """
    return {name: str(threads) for name in _LIBRARIES if name not in unless}


def task_message(pickled: bytes, task: ValidationTask, bounds: Mapping[str, str]) -> Message:
    """Return the first message to the process: pickled function, task and `bounded_threads`."""
    return ["validate", pickled, pickle.dumps(task), dict(bounds)]


def main(connection: socket.socket, descriptors: Sequence[int]) -> int:
    """Validate, and send the outcome to the driver; return the exit code."""
    channel = SocketChannel(connection)
    _, function, task, bounds = channel.receive()
    _bound_torch(bounds)
    try:
        channel.send(["validated", call(function, pickle.loads(task))])
    except BaseException as error:
        # Flush output without a newline, which may hold the reason.
        flush_output()
        channel.send(raised_message(error, pickled_error(error)))
    return 0


def _bound_torch(bounds: Mapping[str, str]) -> None:
    """Set torch's number of threads, if the zygote has imported it with other variables."""
    set_num_threads: Any = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_num_threads is not None and _OPENMP in bounds:
        set_num_threads(int(bounds[_OPENMP]))
