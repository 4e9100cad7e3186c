"""`polytrain report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import echo
from polytrain.view.cli.found import Unreadable, as_json, named_run, print_json, run_argument

if TYPE_CHECKING:
    from polytrain.view.page.facts import Facts


@click.command("report")
@run_argument
@click.option("-o", "--output", help="The file to write; by default NAME.html, in this directory.")
@as_json
def command(run: str, output: str | None, as_json: bool) -> None:
    """Write RUN as one HTML page, which opens from disk and needs no network.

    With --json the same facts are printed. Then the page is written only if --output names it.
    """
    facts = facts_of_named(run)
    from polytrain.view.page import rendering

    if as_json:
        print_json("report", rendering.as_json(facts))
    elif output is None:
        output = f"{facts.source.name}.html"
    if output is not None:
        write_file(output, rendering.page(facts), quiet=as_json)


def facts_of_named(run: str) -> Facts:
    """Return the facts of the run of this path, address or name.

    Raises:
        RunNotFound: there is none.
        click.ClickException: it can't be read.
    """
    from polytrain.view.page.reading import read_facts
    from polytrain_plugins import PolytrainError

    location = named_run(run).location
    try:
        return read_facts(location)
    except (OSError, PolytrainError) as error:
        raise Unreadable(location, error) from error


def write_file(name: str, text: str, *, quiet: bool) -> None:
    """Write the file that --output names.

    Raises:
        click.ClickException: it can't be written.
    """
    path = Path(name).expanduser()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = error.strerror or str(error)
        raise click.ClickException(
            f"--output: {path} can't be written: {what}. Give a file in a directory that exists."
        ) from error
    if not quiet:
        echo(f"Wrote {path} ({len(text.encode()) / 1000:.0f} kB).")
