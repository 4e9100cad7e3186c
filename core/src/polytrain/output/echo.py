"""The only place that prints lines, so that untrusted text can't control a terminal.

Names, reasons and errors may come from a file that somebody else wrote. An escape sequence in them
could change what the terminal shows, its title or the clipboard.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

from polytrain.output.line_layout import printable
from polytrain.output.streams import Style, has_colours, is_notebook, painted, write_text

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_NO_COLOUR = "\x1b[0m"


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
    colours = [*_COLOUR.findall(line), _NO_COLOUR]
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


def write_line(line: str, target: TextIO) -> None:
    """Write a printable line, with escapes for characters that the stream's encoding lacks.

    Raises:
        OSError, ValueError: the reader is gone, or the stream is closed.
    """
    write_text(target, f"{line}\n")


class PrintableFormatter(logging.Formatter):
    """Formats a program's own log, line by line, as `echo` prints lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's message and traceback."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def _is_terminal(target: TextIO) -> bool:
    # A program's replacement for a stream may lack the method.
    return bool(getattr(target, "isatty", bool)())
