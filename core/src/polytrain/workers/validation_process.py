"""The process that validates one checkpoint. The zygote forks it, as it does worker processes."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from polytrain.common.output import flush_output
from polytrain.workers.messages import Message, SocketChannel, raised_message
from polytrain.workers.pickling import pickled_error
from polytrain.workers.validator import ValidationTask, call


def task_message(pickled: bytes, task: ValidationTask, threads: int) -> Message:
    """The first message to the process: the pickled function, and its call."""
    return ["validate", pickled, pickle.dumps(task), threads]


def run_and_exit(connection: socket.socket, page: int, descriptors: Sequence[int]) -> NoReturn:
    """Validate, send the outcome, and exit, without returning into the zygote's frames.

    Args:
        connection: to the driver.
        page: a progress page, which nobody reads.
        descriptors: none.
    """
    code = 1
    try:
        channel = SocketChannel(connection)
        _, function, task, threads = channel.receive()
        _bound_threads(threads)
        try:
            channel.send(["validated", call(function, pickle.loads(task))])
        except BaseException as error:
            # Output without a newline is still buffered, and may hold the reason.
            flush_output()
            channel.send(raised_message(error, pickled_error(error)))
        code = 0
        # The interpreter's own finalisation takes frameworks seconds, and there is nothing to save.
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def _bound_threads(threads: int) -> None:
    """Let libraries start this many threads, also one that the zygote has imported."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    set_num_threads: Any = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(threads)
