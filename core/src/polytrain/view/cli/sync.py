"""`polytrain sync`: send trackers what they lack of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import echo, echo_lines
from polytrain.text.described import numbered
from polytrain.trackers import NAMES
from polytrain.view.cli.found import (
    Refused,
    as_json,
    named_run,
    print_json,
    readable,
    run_argument,
)
from polytrain.view.run_state import RunState

if TYPE_CHECKING:
    from polytrain.trackers.tracker import Tracker
    from polytrain.view.present import PresentRun


@click.command("sync")
@run_argument
@click.option(
    "--to",
    multiple=True,
    metavar="NAME[=PLACE]",
    help=f"A tracker ({', '.join(NAMES)}), and its file, directory, server or project. Any number "
    "of times.",
)
@click.option(
    "--uncommitted",
    is_flag=True,
    help="Send also the steps that no checkpoint covers. A resumed run doesn't send them again.",
)
@as_json
def command(run: str, to: Sequence[str], uncommitted: bool, as_json: bool) -> int:
    """Send the steps of RUN to the trackers that lack them: the run's own, or those named by --to.

    A step that a tracker has isn't sent again. The exit code is 1 if a tracker can't be used.

    Whoever can write to the run's storage can change where its trackers send. So a place outside of
    the run's directory is used only if this process's environment names the same one, or --to
    does: polytrain sync RUN --to mlflow=https://mlflow.example.com
    """
    from polytrain.errors import RunOwnedError
    from polytrain.run.lease import leased
    from polytrain.trackers.delivery import send_missing

    found = named_run(run)
    if found.state is RunState.RUNNING:
        who = found.driver or "its driver"
        raise click.ClickException(
            f"{found.location.address} is running ({who}) and sends its steps itself. At its end, "
            "what is missing is sent."
        )
    location = replace(found.location, retry_s=0)
    trackers = _trackers(found, to)
    rows: dict[str, int] = {}
    errors: dict[str, str] = {}
    try:
        # Nobody resumes the run meanwhile.
        with leased(location.open(), location.open(), drives=False):
            for tracker in trackers:
                try:
                    rows[repr(tracker)] = send_missing(tracker, location, all_rows=uncommitted)
                except Exception as error:
                    errors[repr(tracker)] = f"{type(error).__name__}: {error}"
    except RunOwnedError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"{location.address} can't be written: {error.strerror or error}. While it sends, sync "
            "holds the run's lease, and keeps there what each tracker has. Run it as a user who "
            "may write there, or copy the run to a directory where you may, and sync the copy."
        ) from error
    if as_json:
        print_json("sync", {"sent": rows, "errors": errors})
    else:
        for name, count in rows.items():
            echo(f"{name}: {numbered(count, 'step')} sent")
        for name, what in errors.items():
            echo_lines(f"{name}: {what}", err=True)
    return 1 if errors else 0


def _trackers(found: PresentRun, to: Sequence[str]) -> list[Tracker]:
    from polytrain.trackers.destinations import Destination, chosen
    from polytrain.trackers.state import kept_trackers

    location = found.location
    try:
        destinations = [Destination.of(each) for each in to]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with readable(location, ValueError):
        kept = list(kept_trackers(location.open()))
    directory = Path(location.address) if location.is_local else None
    trackers, unconfirmed = chosen(kept, destinations, directory)
    if unconfirmed:
        raise Refused(_to_confirm(location.address, unconfirmed))
    if not trackers:
        raise Refused(
            f"{location.address} has no tracker. Name one of {', '.join(NAMES)}, as in --to csv."
        )
    problems = [
        str(problem)
        for each in trackers
        for problem in (
            *each.problems(),
            *each.place_problems(location.address, is_directory=location.is_local),
        )
    ]
    if problems:
        raise click.ClickException("\n".join(problems))
    return trackers


def _to_confirm(address: str, trackers: Sequence[Tracker]) -> str:
    from polytrain.trackers.destinations import to_option

    places = [f"  {each.name}: {each.resolved().place}" for each in trackers]
    options = " ".join(map(to_option, trackers))
    return "\n".join(
        [
            f"{address} names trackers outside of its directory:",
            *places,
            "Whoever can write to the run's storage may have written that, and your environment "
            "doesn't name the same. To send there:",
            f"  polytrain sync {shlex.quote(address)} {options}",
        ]
    )
