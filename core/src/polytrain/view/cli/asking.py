"""`polytrain stop` and `polytrain stacks`: what the driver of an active run is asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo, echo_lines
from polytrain.view.cli.found import (
    WholeNumber,
    active_check,
    as_json,
    exit_code_of,
    named_run,
    print_json,
    readable,
    run_argument,
)
from polytrain.view.run_state import RunState, run_state

if TYPE_CHECKING:
    from polytrain.run.lease import Holder
    from polytrain.run.requests import RequestKind
    from polytrain.view.present import PresentRun
    from polytrain_plugins import Stopped

_LOOK_EVERY_S = 0.5

_TIMEOUT_S = 60.0

_SILENT_S = 30.0
"""Seconds without a heartbeat after which a driver that lives can't be asked in this directory."""


@click.command("stop")
@run_argument
@click.option("--reason", default="", help="The reason, which the run's journal keeps.")
@click.option("--no-wait", is_flag=True, help="Return once the driver has the request.")
@as_json
def stop(run: str, reason: str, no_wait: bool, as_json: bool) -> int:
    """End RUN at its next checkpoint; `fit()` resumes it later.

    Waits until its driver has ended it. The exit code is 75 if it can be resumed, 0 if it was
    finished before it stopped, and 1 if it failed.
    """
    from polytrain.run.requests import RequestKind

    found = named_run(run)
    _ask_driver(found, RequestKind.STOP, reason=reason)
    state, stopped = found.state, None
    if not no_wait:
        is_active = active_check(found)
        while is_active():
            time.sleep(_LOOK_EVERY_S)
        state, stopped = _end_by(found.holder, named_run(run))
    if as_json:
        print_json("stop", {"name": found.location.name, "state": state})
    elif no_wait:
        echo(f"{found.location.name} ends at its next checkpoint.")
    else:
        echo(f"{found.location.name}: {stopped or state}")
    return 0 if no_wait else exit_code_of(state)


@click.command("stacks")
@run_argument
@click.option("--rank", type=WholeNumber(min=0), metavar="N", help="Only this rank's.")
@as_json
def stacks(run: str, rank: int | None, as_json: bool) -> None:
    """Print the stacks of all threads of RUN's worker processes, which aren't paused for it."""
    from polytrain.run.requests import RequestKind

    found = named_run(run)
    stacks = _ask_driver(found, RequestKind.STACKS).get("stacks")
    if not stacks:
        raise click.ClickException(f"{found.location.name} has no worker processes at the moment")
    if rank is not None:
        if str(rank) not in stacks:
            raise click.ClickException(
                f"--rank: there is no rank {rank}. There are: {', '.join(stacks)}"
            )
        stacks = {str(rank): stacks[str(rank)]}
    if as_json:
        print_json("stacks", stacks)
    else:
        texts = (f"Rank {number}:\n{text.rstrip()}" for number, text in stacks.items())
        echo_lines("\n\n".join(texts))


def _ask_driver(run: PresentRun, kind: RequestKind, *, reason: str = "") -> Mapping[str, Any]:
    """Request something of a run's driver, and return its answer.

    Raises:
        click.ClickException: the run isn't active, its driver doesn't answer, or its storage can't
            be used.
    """
    from polytrain.errors import DamagedFileError
    from polytrain.run.requests import NoAnswerError, ask

    name = run.location.name
    if run.state is not RunState.RUNNING or run.holder is None:
        raise click.ClickException(f"{name} isn't active: it is {run.state}")
    storage = run.location.open()
    try:
        _expect_driver(run)
        return ask(storage, run.holder.token, kind, timeout_s=_TIMEOUT_S, reason=reason)
    except NoAnswerError as error:
        _expect_driver(run)
        raise click.ClickException(
            f"{name}: {error}. It is {run.holder.description}: is that process alive?"
        ) from error
    except (OSError, DamagedFileError) as error:
        raise click.ClickException(f"{run.location.address} can't be used: {error}") from error


def _end_by(driver: Holder | None, run: PresentRun) -> tuple[RunState, Stopped | None]:
    """Return how a driver has ended a run, which another one may have resumed since, and why."""
    from polytrain.record.entries import RunConcluded

    state, stopped = RunState.INTERRUPTED, None
    with readable(run.location):
        for entry in run.entries():
            if driver is None or entry.token > driver.token:
                break
            if isinstance(entry, RunConcluded) and entry.token == driver.token:
                stopped = entry.stopped
                can_resume = stopped is not None and not stopped.is_final
                state = run_state(succeeded=entry.succeeded, stopped=can_resume, is_held=False)
    return state, stopped


def _expect_driver(run: PresentRun) -> None:
    """Refuse a copy of an active run's directory: its driver looks for requests in the original."""
    from polytrain.run.lease import holder

    owner = holder(run.location.open())
    if owner is None or not owner.is_held:
        return
    if run.location.is_local and _is_another_directory(owner.root, run.location.address):
        raise click.ClickException(
            f"{run.location.address} is a copy of an active run's directory: its driver, "
            f"{owner.description}, works in {owner.root}. Name that directory."
        )
    silent_s = time.monotonic() - owner.beat_monotonic
    if silent_s > _SILENT_S:
        raise click.ClickException(
            f"{run.location.address} is a copy of an active run's directory, or its driver is "
            f"suspended: {owner.description}, lives, and hasn't written there for {silent_s:.0f} s."
            " Name the run's own directory, or continue that process."
        )


def _is_another_directory(root: str, directory: str) -> bool:
    """Return whether `root` is known to be another directory than this one, links followed."""
    return os.path.isdir(root) and not os.path.samefile(root, directory)
