"""The user's streams: notebooks, colours, and writes that outlive their readers."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from enum import StrEnum
from typing import TextIO


def write_text(stream: TextIO, text: str) -> None:
    """Write text in one call if possible, because other threads write, too.

    This blocks while nobody reads, but without the stream's lock: other prints, and the
    interpreter at its end, would wait for that.

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
    # Flush first what the program has printed before.
    stream.flush()
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # A process that shares the descriptor has made it non-blocking.
            room.poll()


def are_one(first: TextIO | None, second: TextIO | None) -> bool:
    """Return whether two streams write to the same terminal, pipe or file."""
    if first is None or second is None or is_notebook():
        return False
    try:
        return os.path.sameopenfile(first.fileno(), second.fileno())
    except (AttributeError, OSError, ValueError):  # a replacement, or it is closed
        return False


def _waiting_descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a stream that can block; None for files and other objects."""
    # A replacement by a notebook or a test runner has its own `write`.
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        descriptor = stream.fileno()
    except OSError:  # it has no descriptor
        return None
    mode = os.fstat(descriptor).st_mode
    return None if stat.S_ISREG(mode) else descriptor


def _escaped(text: str, encoding: str) -> bytes:
    """Return encoded text, with escapes for characters that the encoding lacks."""
    return text.encode(encoding, "backslashreplace")


def is_notebook() -> bool:
    """Return whether this program is a notebook's kernel. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


_RESET = "\x1b[0m"
_FORCE = ("FORCE_COLOR", "CLICOLOR_FORCE")


class Style(StrEnum):
    """How text stands out."""

    PLAIN = ""
    BOLD = "1"
    DIM = "2"
    BAD = "31"
    GOOD = "32"
    CHANGED = "35"


def has_colours(stream: TextIO) -> bool:
    """Return whether text for a stream is coloured.

    It is on a terminal that isn't dumb, unless `NO_COLOR` is set. `FORCE_COLOR` and
    `CLICOLOR_FORCE`, unless they are 0, ask for it elsewhere, too, but not in a notebook.
    """
    # Jupyter's kernels set the variables that ask for colours, for the programs that they start.
    if os.environ.get("NO_COLOR") or is_notebook():
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in _FORCE):
        return True
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    try:
        # A program's replacement for a stream may lack the method.
        return bool(getattr(stream, "isatty", bool)())
    except ValueError:  # it is closed
        return False


def painted(text: str, style: Style) -> str:
    """Return text in a style; it ends with the text."""
    return f"\x1b[{style}m{text}{_RESET}" if style and text else text
