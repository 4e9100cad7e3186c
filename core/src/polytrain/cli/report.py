"""`polytrain report`: a run as one page."""

from __future__ import annotations

from pathlib import Path

import click

from polytrain.cli.found import as_json, named_run, print_json
from polytrain.common.errors import RunFormatError, RunNotFoundError


@click.command("report")
@click.argument("run")
@click.option("-o", "--output", help="The page to write; by default NAME.html, here.")
@as_json
def command(run: str, output: str | None, as_json: bool) -> None:
    """Write RUN as one page, which opens from disk and needs no network.

    With --json the same facts are printed, and the page is written if --output names it.
    """
    found = named_run(run)
    from polytrain.page import rendering
    from polytrain.page.reading import read_facts

    try:
        facts = read_facts(found.location)
    except (OSError, RunFormatError, RunNotFoundError) as error:
        raise click.ClickException(f"{found.location.address} can't be read: {error}") from error
    if as_json:
        print_json("report", rendering.as_json(facts))
    if output is None and not as_json:
        output = f"{found.location.name}.html"
    if output is not None:
        write(Path(output), rendering.page(facts), quiet=as_json)


def write(path: Path, text: str, *, quiet: bool) -> None:
    """Write a file that the command line names.

    Raises:
        click.ClickException: it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(
            f"--output: {path} can't be written: {error.strerror or error}"
        ) from error
    if not quiet:
        click.echo(f"Wrote {path} ({len(text.encode()) / 1000:.0f} kB).")
