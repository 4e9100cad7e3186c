"""`polytrain report` and `polytrain diff`: a run as one page, and two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo
from polytrain.output.line_layout import columns, cut, padded, printable
from polytrain.view.cli.found import (
    as_json,
    file_at,
    named_run,
    print_json,
    readable,
    run_argument,
)

if TYPE_CHECKING:
    from polytrain.view.page.comparison import Comparison, Difference
    from polytrain.view.page.facts import Facts

_LONGEST, _LONGEST_NAME = 40, 64


@click.command("report")
@run_argument
@click.option("-o", "--output", help="The file to write; by default NAME.html, in this directory.")
@as_json
def report(run: str, output: str | None, as_json: bool) -> None:
    """Write RUN as one HTML page, which opens from disk and needs no network.

    With --json the same facts are printed. Then the page is written only if --output names it.
    """
    facts = _facts_of(run)
    from polytrain.view.page import rendering

    if as_json:
        print_json("report", rendering.as_json(facts))
    elif output is None:
        output = f"{facts.source.name}.html"
    if output is not None:
        _write_file(output, rendering.page(facts), quiet=as_json)


def _facts_of(run: str) -> Facts:
    """Return the facts of the run of this path, address or name.

    Raises:
        NotFound: there is none.
        click.ClickException: it can't be read.
    """
    found = named_run(run)
    from polytrain.view.page.reading import facts_of_run

    with readable(found.location):
        return facts_of_run(found)


def _write_file(name: str, text: str, *, quiet: bool) -> None:
    """Write the file that --output names.

    Raises:
        click.ClickException: it can't be written.
    """
    path = file_at(name, "--output")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = error.strerror or str(error)
        raise click.ClickException(
            f"--output: {path} can't be written: {what}. Give a file in a directory that exists."
        ) from error
    if not quiet:
        echo(f"Wrote {path} ({len(text.encode()) / 1000:.0f} kB).")


@click.command("diff")
@click.argument("first")
@click.argument("second")
@click.option(
    "-o", "--output", help="Write both as one HTML page, with their curves, to this file."
)
@as_json
def diff(first: str, second: str, output: str | None, as_json: bool) -> None:
    """Compare the runs FIRST and SECOND: settings, outcome, times and last metrics."""
    from polytrain.view.page.comparison import comparison

    runs = _facts_of(first), _facts_of(second)
    found = comparison(*runs)
    if output is not None:
        from polytrain.view.page.rendering import comparison_page

        _write_file(output, comparison_page(*runs), quiet=as_json)
    elif not as_json:
        _print_differences(found)
    if as_json:
        print_json("diff", asdict(found))


def _print_differences(found: Comparison) -> None:
    parts = (
        ("settings that differ", found.configuration),
        ("outcome", found.outcome),
        ("seconds", found.seconds),
        ("last metrics", found.metrics),
    )
    rows = [row for _, some in parts for row in some]
    width = max(columns(_name(row.name)) for row in rows)
    first, second = map(_name, found.names)
    column = max(columns(first), *(columns(_short(row.first)) for row in rows))
    echo(f"{'':<{width}}  {padded(first, column, to_the_right=True)}  {second}")
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
        first = padded(_short(row.first), column, to_the_right=True)
        yield f"{padded(_name(row.name), width)}  {first}  {_short(row.second)}{change}"


def _change(first: Any, second: Any) -> str:
    numbers = [each for each in (first, second) if isinstance(each, int | float)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or not first or first == second:
        return ""
    return f"  ({100 * (second - first) / abs(first):+.1f} %)"


def _name(name: str) -> str:
    return cut(printable(name), _LONGEST_NAME)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return cut(printable(f"{value:.4g}" if isinstance(value, float) else str(value)), _LONGEST)
