"""`polytrain show`: one run, as its journal tells it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import Style, echo
from polytrain.view.cli.found import (
    WholeNumber,
    as_json,
    exit_code_of,
    named_run,
    print_json,
    run_argument,
)
from polytrain.view.run_state import RunState

if TYPE_CHECKING:
    from polytrain.view.present import PresentRun

_STYLES = {
    RunState.FINISHED: Style.GOOD,
    RunState.FAILED: Style.BAD,
    RunState.STOPPED: Style.CHANGED,
    RunState.INTERRUPTED: Style.CHANGED,
}


@click.command("show")
@run_argument
@click.option("--serve", is_flag=True, help="Serve its page to browsers on this machine instead.")
@click.option("-f", "--follow", is_flag=True, help="Show its progress until it ends instead.")
@click.option(
    "--port", type=WholeNumber(1, 65535), metavar="N", help="With --serve; a free one by default."
)
@as_json
def command(run: str, serve: bool, follow: bool, port: int | None, as_json: bool) -> int:
    """Show RUN: its state, its attempts, and where its time went.

    With --follow and --json, JSON Lines are printed, as by RunConfig(progress="json"). The exit
    code is 0 if the run is active or finished, 1 if it failed, and 75 if it was stopped or
    interrupted and fit() resumes it.
    """
    if port is not None and not serve:
        raise click.UsageError("--port is only for --serve. Add that, or leave --port out.")
    if serve and as_json:
        raise click.UsageError("--serve and --json exclude each other. Give one of them.")
    if serve and follow:
        raise click.UsageError("--serve and --follow exclude each other. Give one of them.")
    found = named_run(run)
    if follow:
        from polytrain.view.cli.following import followed

        followed(found, as_json=as_json)
        state = named_run(run).state
        # Another driver has resumed it at once: what was followed hasn't finished.
        return exit_code_of(RunState.INTERRUPTED if state is RunState.RUNNING else state)
    if serve:
        _serve(found, port or 0)
        return 0
    from polytrain.view.cli.run_text import facts, run_lines

    if as_json:
        print_json("show", facts(found))
    else:
        first, *lines = run_lines(found)
        echo(first, style=_STYLES.get(found.state, Style.PLAIN))
        for line in lines:
            echo(line)
    return exit_code_of(found.state)


def _serve(run: PresentRun, port: int) -> None:
    from polytrain.view.page.serving import served

    try:
        with contextlib.suppress(KeyboardInterrupt), served(run.location, port=port) as server:
            echo(f"The page of {run.location.name} is at {server.url} (Ctrl-C ends this)")
            # Until Ctrl-C.
            threading.Event().wait()
    except OSError as error:
        raise click.ClickException(f"--port: {port}: {error.strerror or error}") from error
