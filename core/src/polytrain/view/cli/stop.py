"""`polytrain stop`: end an active run at its next checkpoint."""

from __future__ import annotations

import time

import click

from polytrain.output.echo import echo
from polytrain.record.state import RunState
from polytrain.view.cli.found import FoundRun, as_json, named_run, print_json, run_argument

_LOOK_EVERY_S = 0.5


@click.command("stop")
@run_argument
@click.option("--reason", default="", help="The reason, which the run's journal keeps.")
@click.option("--no-wait", is_flag=True, help="Return once the driver has the request.")
@as_json
def command(run: str, reason: str, no_wait: bool, as_json: bool) -> int:
    """End RUN at its next checkpoint; `fit()` resumes it later.

    Waits until it has ended. The exit code is 75 if it can be resumed, 0 if it was finished before
    it stopped, and 1 if it failed.
    """
    from polytrain.run.requests import RequestKind
    from polytrain.view.cli.asking import ask_driver

    found = named_run(run)
    ask_driver(found, RequestKind.STOP, reason=reason)
    if not no_wait:
        found = _ended(run)
    if as_json:
        print_json("stop", {"name": found.location.name, "state": found.state})
    elif no_wait:
        echo(f"{found.location.name} ends at its next checkpoint.")
    else:
        echo(f"{found.location.name}: {found.history.stopped or found.state}")
    return 0 if no_wait else found.exit_code


def _ended(run: str) -> FoundRun:
    while (found := named_run(run)).state is RunState.RUNNING:
        time.sleep(_LOOK_EVERY_S)
    return found
