"""The body of a worker process on this machine."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from polytrain.functions.pickler import dumps
from polytrain.prediction.predictor import Predictor


def run_and_exit(connection: socket.socket, page: int, _: Sequence[int]) -> NoReturn:
    """Predict units until the driver closes the connection."""
    channel = Connection(connection.detach())
    code = 1
    try:
        _serve(channel)
        code = 0
    except (EOFError, OSError) as error:
        # The driver is gone, or needs nothing more.
        code = 0 if isinstance(error, EOFError) else 1
    finally:
        # The interpreter's own finalisation is left out, as in other worker processes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(channel: Connection) -> None:
    try:
        predictor = Predictor(pickle.loads(channel.recv_bytes()))
        while True:
            _send(channel, "ready", None)
            unit, rows = pickle.loads(channel.recv_bytes())
            for part in predictor.predicted(unit, rows):
                _send(channel, "predicted", part)
    except EOFError:
        raise
    except BaseException as error:
        _send(channel, "raised", portable(error))


def _send(channel: Connection, kind: str, content: Any) -> None:
    channel.send_bytes(dumps((kind, content)))


def portable(error: BaseException) -> BaseException:
    """An exception for another process, with the traceback of this one as a note."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"\nIn the worker process:\n{text.rstrip()}")
    try:
        pickle.loads(dumps(error))
    except Exception:  # whatever an exception's own __reduce__ raises
        return RuntimeError(text)
    return error
