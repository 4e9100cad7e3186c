"""The body of a worker process on this machine."""

from __future__ import annotations

import contextlib
import pickle
import socket
import traceback
from collections.abc import Sequence

from polytrain.functions.pickling import dumps
from polytrain.prediction.predictor import Predictor
from polytrain.workers.processes.channel import ConnectionClosedError, SocketChannel


def main(connection: socket.socket, descriptors: Sequence[int]) -> int:
    """Predict units until the driver closes the connection; return the exit code."""
    channel = SocketChannel(connection)
    try:
        _, task = channel.receive()
        predictor = Predictor(pickle.loads(task))
        while True:
            channel.send(["ready"])
            _, pickled = channel.receive()
            unit, rows = pickle.loads(pickled)
            for part in predictor.predicted(unit, rows):
                channel.send(["predicted", dumps(part)])
    except ConnectionClosedError:
        return 0
    except BaseException as error:
        with contextlib.suppress(OSError):  # the driver may be gone
            channel.send(["raised", dumps(portable(error))])
        return 1


def portable(error: BaseException) -> BaseException:
    """Return an exception for another process, with its traceback here as a note."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"\nIn the worker process:\n{text.rstrip()}")
    try:
        pickle.loads(dumps(error))
    except Exception:  # an exception's __reduce__ may raise anything
        return RuntimeError(text)
    return error
