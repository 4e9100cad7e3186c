"""`polytrain diff`: two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo
from polytrain.view.cli.found import as_json, print_json
from polytrain.view.cli.report import facts_of_named, write_file

if TYPE_CHECKING:
    from polytrain.view.page.comparison import Comparison, Difference

_LONGEST = 40


@click.command("diff")
@click.argument("first")
@click.argument("second")
@click.option(
    "-o", "--output", help="Write both as one HTML page, with their curves, to this file."
)
@as_json
def command(first: str, second: str, output: str | None, as_json: bool) -> None:
    """Compare the runs FIRST and SECOND: settings, outcome, times and last metrics."""
    from polytrain.view.page.comparison import comparison

    runs = facts_of_named(first), facts_of_named(second)
    found = comparison(*runs)
    if output is not None:
        from polytrain.view.page.rendering import comparison_page

        write_file(output, comparison_page(*runs), quiet=as_json)
    elif not as_json:
        _print(found)
    if as_json:
        print_json("diff", asdict(found))


def _print(found: Comparison) -> None:
    parts = (
        ("settings that differ", found.configuration),
        ("outcome", found.outcome),
        ("seconds", found.seconds),
        ("last metrics", found.metrics),
    )
    rows = [row for _, some in parts for row in some]
    width = max(len(row.name) for row in rows)
    column = max(len(found.names[0]), *(len(_short(row.first)) for row in rows))
    echo(f"{'':<{width}}  {found.names[0]:>{column}}  {found.names[1]}")
    for title, some in parts:
        echo()
        echo(title if some else f"{title}: none")
        # How much an option has changed says nothing.
        is_measured = some is not found.configuration
        for line in _lines(some, width, column, with_change=is_measured):
            echo(line)


def _lines(
    rows: Iterable[Difference], width: int, column: int, *, with_change: bool
) -> Iterable[str]:
    for row in rows:
        change = _change(row.first, row.second) if with_change else ""
        yield f"{row.name:<{width}}  {_short(row.first):>{column}}  {_short(row.second)}{change}"


def _change(first: Any, second: Any) -> str:
    numbers = [each for each in (first, second) if isinstance(each, int | float)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or not first or first == second:
        return ""
    return f"  ({100 * (second - first) / abs(first):+.1f} %)"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
