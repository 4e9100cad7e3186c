"""What a user reads of a run: a few lines of text or HTML, and how to resume it after a signal."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from polytrain.output.call_queues import CallQueues
from polytrain.output.line_layout import cut, printable
from polytrain.output.queued_records import queued_records

if TYPE_CHECKING:
    from polytrain.api.result import Result

Row = tuple[str, str]
"""What it is, and its value."""

_LINE, _TITLE = 100, 60


def line(text: str, width: int = _LINE) -> str:
    """Return the first line of a text, cut at its end."""
    return cut(printable(text.strip().partition("\n")[0]), width)


def place(path: str, width: int = _LINE) -> str:
    """Return a path or an address, cut in its middle: its end is what tells it from others."""
    text = printable(path)
    return text if len(text) <= width else f"{text[: width // 3]}…{text[-width // 2 :]}"


def as_text(title: str, rows: Iterable[Row]) -> str:
    """Return a title and its rows, those without a value left out."""
    shown = [f"  {name:<11}{value}" for name, value in rows if value]
    return "\n".join([line(title, _TITLE), *shown])


def as_html(title: str, rows: Iterable[Row]) -> str:
    """Return the same for a notebook: it has the colours of the page around it."""
    cells = "".join(
        '<tr style="background: none"><th style="text-align: left; opacity: 0.7">'
        f'{escape(name)}</th><td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows
        if value
    )
    return f"<div><strong>{escape(line(title, _TITLE))}</strong><table>{cells}</table></div>"


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the same program needs to resume a run."""

    address: str
    new_name: str | None
    """The name that the run got because it was given none; without it, another run begins."""

    starts_over: bool
    """Whether `fit(resume="never")` was called."""

    def after(self, signal_name: str, result: Result | None, *, has_failed: bool) -> str:
        """Return the line.

        Args:
            result: the run's result; None if there is none, because it was ended at once.
            has_failed: whether the run has failed meanwhile.
        """
        if has_failed:
            shown = f"polytrain show {shlex.quote(self.address)}"
            state = f"the run has failed, see {shown!r}, and {signal_name} ends the program"
        elif result is not None and result.finished:
            return f"{self.address}: the run was finished when {signal_name} ended the program."
        else:
            state = f"stopped by {signal_name}"
        return f"{self.address}: {state}. {self._how(result)}"

    def _how(self, result: Result | None) -> str:
        again = "run the same script or cell again"
        if self.starts_over:
            return f'To start over, {again}; only fit(resume="auto") would resume the run.'
        if self.new_name is not None:
            again += f" with RunConfig(name={self.new_name!r})"
        if result is None:
            return f"To resume it, {again}; what came after its newest checkpoint is repeated."
        if result.checkpoint is None:
            return f"To start over, {again}: the run has no checkpoint."
        return f"To resume it from its newest checkpoint, {again}."


def warn(line: str) -> None:
    """Log a line after a run, without waiting long for a terminal or pipe that nobody reads."""
    with CallQueues() as queues, queued_records(queues):
        logger.warning("%s", line)
