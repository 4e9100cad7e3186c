"""Writes to the user's streams, whose readers may have stopped."""

from __future__ import annotations

import io
import os
import select
import stat
from typing import TextIO


def write_text(stream: TextIO, text: str) -> None:
    """Write text in one call, if that is possible: other threads write, too.

    While nobody reads, this waits; and meanwhile it doesn't hold the lock of the stream, which all
    that print, and the interpreter when it ends, would wait for.

    Raises:
        OSError: the reader is gone.
        ValueError: the stream is closed.
    """
    descriptor = _waiting_descriptor(stream)
    if descriptor is None:
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            stream.write(_escaped(text, error.encoding).decode(error.encoding))
        stream.flush()
        return
    try:
        data = text.encode(stream.encoding, stream.errors or "strict")
    except UnicodeEncodeError as error:
        data = _escaped(text, error.encoding)
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    room.poll()
    # What the program has printed before comes before it.
    stream.flush()
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another process has made it so, with which it is shared.
            room.poll()


def _waiting_descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a stream that waits for its reader; None for files and others."""
    # What a notebook or a test runner has put in its place takes text by its own method.
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        descriptor = stream.fileno()
    except OSError:  # nothing of the system's is behind it
        return None
    mode = os.fstat(descriptor).st_mode
    return None if stat.S_ISREG(mode) else descriptor


def _escaped(text: str, encoding: str) -> bytes:
    """Return text with what an encoding lacks as escapes."""
    return text.encode(encoding, "backslashreplace")
