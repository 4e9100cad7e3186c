"""`polytrain show`: one run, as its journal tells it."""

from __future__ import annotations

import contextlib
import threading
from datetime import datetime
from typing import Any

import click

from polytrain.cli.found import FoundRun, as_json, named_run, print_json, run_argument
from polytrain.cli.runs import in_short
from polytrain.run.overview import AttemptOverview, RunState, attempts


@click.command("show")
@run_argument
@click.option("--serve", is_flag=True, help="Serve its page to this machine's browsers instead.")
@click.option("--port", type=click.IntRange(1, 65535), help="With --serve; a free one by default.")
@as_json
def command(run: str, serve: bool, port: int | None, as_json: bool) -> int:
    """Show RUN: its state, its attempts, where its time went.

    The exit code is 0, or 75 if the run was stopped or interrupted and fit() resumes it.
    """
    if port is not None and not serve:
        raise click.UsageError("--port is for --serve")
    if serve and as_json:
        raise click.UsageError("--serve and --json exclude each other")
    found = named_run(run)
    if serve:
        _serve(found, port or 0)
        return 0
    begun = attempts(found.entries())
    if as_json:
        print_json("show", _facts(found, begun))
    else:
        _print(found, begun)
    return found.exit_code


def _serve(run: FoundRun, port: int) -> None:
    from polytrain.page.serving import served

    try:
        with contextlib.suppress(KeyboardInterrupt), served(run.location, port=port) as server:
            click.echo(f"The page of {run.location.name} is at {server.url}. Ctrl-C ends this.")
            threading.Event().wait()
    except OSError as error:
        raise click.ClickException(f"--port: {port}: {error.strerror or error}") from error


def _facts(run: FoundRun, begun: tuple[AttemptOverview, ...]) -> dict[str, Any]:
    history = run.history
    return {
        "name": run.location.name,
        "path": run.location.address,
        "state": run.state,
        "reason": history.reason,
        "driver": run.holder.description if run.holder is not None else None,
        "backend": history.identity["backend"],
        "workers": history.world_size,
        "reports": len(history.history),
        "metrics": dict(history.metrics),
        "attempts": [
            {
                "driver": each.driver,
                "number": each.number,
                "workers": each.num_workers,
                "first_step": each.first_step,
                "launched": each.launched,
                "ended": each.ended,
                "failure": each.failure,
                "reason": each.reason,
            }
            for each in begun
        ],
        "seconds": dict(history.ledger.seconds),
        "goodput": history.ledger.goodput,
        "lost_steps": history.ledger.lost_steps,
    }


def _print(run: FoundRun, begun: tuple[AttemptOverview, ...]) -> None:
    history = run.history
    click.echo(f"{run.location.name}: {_verdict(run)}")
    click.echo(f"  in         {run.location.address}")
    click.echo(f"  backend    {history.identity['backend']}, {history.world_size} workers")
    click.echo(f"  reports    {len(history.history)}: {in_short(history.metrics) or 'none'}")
    click.echo()
    click.echo("attempts")
    for each in begun:
        click.echo(f"  {_line(each)}")
        if each.failure is not None:
            click.echo(f"      {each.failure} ({each.reason})")
    click.echo()
    click.echo(str(history.ledger))


def _verdict(run: FoundRun) -> str:
    who = run.holder.description if run.holder is not None else "nobody"
    match run.state:
        case RunState.RUNNING:
            return f"running: {who}"
        case RunState.INTERRUPTED:
            return f"interrupted ({who} has died): fit() resumes it"
        case RunState.STOPPED:
            return f"stopped ({run.history.reason}): fit() resumes it"
        case RunState.FAILED:
            return f"failed: {run.history.reason}"
        case RunState.FINISHED:
            return f"finished ({run.history.reason})" if run.history.stopped else "finished"


def _line(attempt: AttemptOverview) -> str:
    launched = datetime.fromtimestamp(attempt.launched)
    took = "" if attempt.ended is None else f", {attempt.ended - attempt.launched:.1f} s"
    return (
        f"{attempt.driver}.{attempt.number}  {launched:%Y-%m-%d %H:%M:%S}{took}, "
        f"{attempt.num_workers} workers, after {attempt.first_step} steps"
    )
