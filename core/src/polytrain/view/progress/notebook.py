"""Shows one output of a notebook cell, as HTML that is replaced when it changes."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import import_module
from typing import Any


class NotebookOutput:
    """Shows lines of text below the cell that runs when the first lines are shown."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: list[str] = []

    def show(self, lines: Sequence[str]) -> None:
        """Replace the shown lines."""
        if list(lines) == self._shown:
            return
        self._shown = list(lines)
        # Import it late: only a notebook's kernel needs it, and has it.
        ipython = import_module("IPython.display")
        page = ipython.HTML(as_html(lines))
        if self._handle is None:
            self._handle = ipython.display(page, display_id=True)
        else:
            self._handle.update(page)


def as_html(lines: Sequence[str]) -> str:
    """Return lines of text as HTML."""
    text = html.escape("\n".join(lines))
    return f'<pre style="white-space: pre-wrap; line-height: 1.4; margin: 0">{text}</pre>'
