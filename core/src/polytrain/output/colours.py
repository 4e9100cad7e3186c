"""Colours of what polytrain itself shows.

They are of the terminal's own palette, and legible on a dark and on a light background, which
yellow, cyan and blue aren't.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TextIO

from polytrain.output.streams import is_notebook

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
