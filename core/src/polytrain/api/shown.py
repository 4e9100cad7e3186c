"""A result, or a run that trains, as a few lines of text or HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from polytrain.output.line_layout import cut, printable
from polytrain.text.metrics import single_values

Row = tuple[str, str]
"""What it is, and its value."""

_METRICS = 4
_NAME, _VALUE, _LINE, _TITLE = 24, 12, 100, 60


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return the first metrics in a line, with the number of the others."""
    known = list(single_values(metrics))
    shown = [f"{line(name, _NAME)} {_value(value)}" for name, value in known[:_METRICS]]
    more = len(known) - _METRICS
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])


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


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else line(str(value), _VALUE)
