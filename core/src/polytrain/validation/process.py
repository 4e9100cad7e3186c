"""The process that validates one checkpoint. The zygote forks it, as it does worker processes."""

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
    """Return the variables that let libraries start this many threads.

    Args:
        threads: how many.
        unless: names of variables that are set already.
    """
    return {name: str(threads) for name in _LIBRARIES if name not in unless}


def task_message(pickled: bytes, task: ValidationTask, bounds: Mapping[str, str]) -> Message:
    """The first message to the process: the pickled function, its call, and `bounded_threads`."""
    return ["validate", pickled, pickle.dumps(task), dict(bounds)]


def main(connection: socket.socket, descriptors: Sequence[int]) -> int:
    """Validate, and send the outcome to the driver; return the exit code."""
    channel = SocketChannel(connection)
    _, function, task, bounds = channel.receive()
    _bound_torch(bounds)
    try:
        channel.send(["validated", call(function, pickle.loads(task))])
    except BaseException as error:
        # Output without a newline is still buffered, and may hold the reason.
        flush_output()
        channel.send(raised_message(error, pickled_error(error)))
    return 0


def _bound_torch(bounds: Mapping[str, str]) -> None:
    """Let torch start this many threads, where the zygote has imported it with other variables."""
    set_num_threads: Any = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_num_threads is not None and _OPENMP in bounds:
        set_num_threads(int(bounds[_OPENMP]))
