"""The user's streams. Untrusted text is printed here alone, and can't control a terminal.

Names, reasons and errors may come from a file that somebody else wrote. An escape sequence in them
could change what the terminal shows, its title or the clipboard.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import stat
import sys
from enum import StrEnum
from typing import TextIO

from polytrain.output.line_layout import printable


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
        # A program's own object may have `write` alone, which is all that `print` needs.
        if hasattr(stream, "flush"):
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


def leave_gone_terminal() -> None:
    """Have this program's streams write to nowhere if their terminal, or their reader, is gone.

    Otherwise each print raises, also in the user's code, and as Python flushes at its end what
    couldn't be written, it ends with code 120 instead of the program's own.
    """
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and is_gone(stream):
            with contextlib.suppress(OSError):  # too many files are open
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def is_gone(stream: TextIO) -> bool:
    """Return whether a stream's terminal, or its reader, is gone. Writes nothing."""
    try:
        descriptor = _waiting_descriptor(stream)
    except (OSError, ValueError):  # it is closed
        return False
    if descriptor is None:
        return False
    end = select.poll()
    end.register(descriptor, 0)
    return bool(end.poll(0))


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
    # Another thread may be importing it just now.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
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
    return takes_sequences(stream)


def takes_sequences(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that control sequences do something on."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    try:
        return _is_terminal(stream)
    except ValueError:  # it is closed
        return False


def painted(text: str, style: Style) -> str:
    """Return text in a style; it ends with the text."""
    return f"\x1b[{style}m{text}{_RESET}" if style and text else text


_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")


def echo(line: str = "", *, err: bool = False, style: Style = Style.PLAIN) -> None:
    """Print one line, with escapes for unprintable characters, including line ends.

    Args:
        err: whether to print to standard error.
    """
    target = sys.stderr if err else sys.stdout
    text = printable(line)
    write_line(painted(text, style) if style and has_colours(target) else text, target)


def echo_lines(text: str, *, err: bool = False) -> None:
    """Print each line of a text with `echo`."""
    for line in text.split("\n"):
        echo(line, err=err)


def output_line(line: str, target: TextIO) -> str:
    """Return a rank's output line, made safe for a stream.

    Colours stay on a terminal and in a notebook, end with the line, and are removed elsewhere. All
    other control sequences are escaped.
    """
    texts = [printable(text.expandtabs()) for text in _COLOUR.split(line)[::2]]
    colours = [*_COLOUR.findall(line), _RESET]
    if len(texts) == 1 or not (_is_terminal(target) or is_notebook()):
        return "".join(texts)
    return "".join(f"{text}{colour}" for text, colour in zip(texts, colours, strict=True))


def rank_line(prefix: str, line: str, target: TextIO, *, is_coloured: bool) -> str:
    """Return a rank's output line as `output_line` does, with a prefix that is dim.

    Args:
        is_coloured: whether the stream has colours.
    """
    shown = output_line(f"{prefix}{line}", target)
    if not is_coloured:
        return shown
    return f"{painted(prefix.rstrip(), Style.DIM)}{shown[len(prefix.rstrip()) :]}"


def without_colours(line: str) -> str:
    """Return a rank's output line without the sequences that colour it."""
    return _COLOUR.sub("", line)


def write_line(line: str, target: TextIO | None) -> None:
    """Write a printable line, with escapes for characters that the stream's encoding lacks.

    A program that was started with a closed stream has none, and nothing is written.

    Raises:
        OSError, ValueError: the reader is gone, or the stream is closed.
    """
    if target is not None:
        write_text(target, f"{line}\n")


class PrintableFormatter(logging.Formatter):
    """Formats a program's own log, line by line, as `echo` prints lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's message and traceback."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def _is_terminal(target: TextIO | None) -> bool:
    # A program's replacement for a stream may lack the method.
    return bool(getattr(target, "isatty", bool)())
