"""What polytrain logs during a run reaches the program's log handlers on threads of their own.

A handler that writes to a terminal waits while that is held, and nothing of a run may wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from polytrain.output.call_queues import CallQueues
from polytrain.output.streams import write_text

_RECORD_SIZE = 1000

# A signal handler may log, too.
_changes = threading.RLock()
_open: list[CallQueues] = []
"""Of the runs of this process. The latest one's take the records."""


@contextmanager
def queued_records(queues: CallQueues) -> Iterator[None]:
    """Have polytrain's log records handled through these queues.

    Args:
        queues: the run's.
    """
    with _changes:
        _open.append(queues)
        if len(_open) == 1:
            _handler.install()
    try:
        yield
    finally:
        with _changes:
            _open.remove(queues)
            if not _open:
                _handler.remove()


class _QueuedHandler(logging.Handler):
    """Passes records on to the handlers in whose place it stands, through queues."""

    def __init__(self) -> None:
        super().__init__()
        self._own: list[logging.Handler] = []
        self._propagates = True

    def install(self) -> None:
        self._own, self._propagates = list(_logger.handlers), _logger.propagate
        _logger.handlers, _logger.propagate = [self], False

    def remove(self) -> None:
        # The program may have configured logging anew meanwhile: then that stays.
        if self in _logger.handlers:
            added = [each for each in _logger.handlers if each is not self]
            _logger.handlers, _logger.propagate = [*self._own, *added], self._propagates

    def emit(self, record: logging.LogRecord) -> None:
        with _changes:
            queues = _open[-1] if _open else CallQueues(at_once=True)
        for handler in self._replaced():
            if record.levelno >= handler.level:
                stream = _plain_stream(handler)
                queue = queues.of(handler if stream is None else stream)
                queue.give(partial(_handle, handler, stream, record), size=_RECORD_SIZE)

    def _replaced(self) -> list[logging.Handler]:
        found = [*self._own, *(logging.getLogger().handlers if self._propagates else ())]
        if not found and logging.lastResort is not None:
            return [logging.lastResort]
        return found


_logger = logging.getLogger("polytrain")
_handler = _QueuedHandler()


def _plain_stream(handler: logging.Handler) -> Any:
    """Return the stream to which a handler of Python's writes; None for all other handlers."""
    if type(handler) in (logging.StreamHandler, type(logging.lastResort)):
        return getattr(handler, "stream", None)
    return None


def _handle(handler: logging.Handler, stream: Any, record: logging.LogRecord) -> None:
    if stream is None:
        handler.handle(record)
        return
    # Not by the handler, whose lock the interpreter's end would wait for.
    passed: object = handler.filter(record)  # or another record, from Python 3.12 on
    if not passed:
        return
    try:
        text = handler.format(passed if isinstance(passed, logging.LogRecord) else record)
        write_text(stream, text + getattr(handler, "terminator", "\n"))
    except Exception:  # as handlers do
        handler.handleError(record)
