"""Passes polytrain's log records during a run to the program's handlers, on their own threads.

A handler that writes to a held terminal blocks, and a run must not wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from polytrain.output.call_queues import CallQueues
from polytrain.output.echo import write_text

_RECORD_SIZE = 1000

# Reentrant: a signal handler may log, too.
_changes = threading.RLock()
_open: list[CallQueues] = []
"""Queues of this process's runs. Those of the latest run take the records."""


@contextmanager
def queued_records(queues: CallQueues) -> Iterator[None]:
    """Handle polytrain's log records through these queues."""
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
    """Passes records through queues to the handlers that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self._own: list[logging.Handler] = []
        self._propagates = True

    def install(self) -> None:
        self._own, self._propagates = list(_logger.handlers), _logger.propagate
        _logger.handlers, _logger.propagate = [self], False

    def remove(self) -> None:
        # If the program has reconfigured logging meanwhile, keep its handlers.
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
                queue.submit(partial(_handle, handler, stream, record), size=_RECORD_SIZE)

    def _replaced(self) -> list[logging.Handler]:
        found = [*self._own, *(logging.getLogger().handlers if self._propagates else ())]
        if not found and logging.lastResort is not None:
            return [logging.lastResort]
        return found


_logger = logging.getLogger("polytrain")
_handler = _QueuedHandler()


def _plain_stream(handler: logging.Handler) -> Any:
    """Return the stream of one of Python's stream handlers; None for all other handlers."""
    if type(handler) in (logging.StreamHandler, type(logging.lastResort)):
        return getattr(handler, "stream", None)
    return None


def _handle(handler: logging.Handler, stream: Any, record: logging.LogRecord) -> None:
    if stream is None:
        handler.handle(record)
        return
    # Don't let the handler write: the interpreter would wait for the handler's lock at its end.
    passed: object = handler.filter(record)  # since Python 3.12 it may return another record
    if not passed:
        return
    try:
        text = handler.format(passed if isinstance(passed, logging.LogRecord) else record)
        write_text(stream, text + getattr(handler, "terminator", "\n"))
    except Exception:  # logging handlers do the same
        handler.handleError(record)
