"""The process that validates one checkpoint, which the zygote forks like worker processes."""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

from polytrain.events.output import flush_output
from polytrain.functions.pickling import pickled_error
from polytrain.validation.validator import ValidationTask, call
from polytrain.workers.processes.channel import Message, SocketChannel
from polytrain.workers.session.messages import raised_message

_OPENMP = "OMP_NUM_THREADS"

_LIBRARIES = (_OPENMP, "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


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
