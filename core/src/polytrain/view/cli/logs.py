"""`polytrain logs`: what the ranks of a run have printed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import echo, has_colours, rank_line, write_line
from polytrain.view.cli.found import WholeNumber, active_check, named_run, readable, run_argument

if TYPE_CHECKING:
    from polytrain.view.present import PresentRun

_LOOK_EVERY_S = 0.5


@click.command("logs")
@run_argument
@click.option(
    "--rank", type=WholeNumber(min=0), metavar="N", help="Only this rank's; all of them by default."
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
def command(run: str, rank: int | None, follow: bool) -> None:
    """Print what the ranks of RUN have printed, one rank after another."""
    found = named_run(run)
    seen = {path: 0 for path in logs_of(found, rank)}
    is_coloured = has_colours(sys.stdout)
    is_active = active_check(found)
    while True:
        is_running = follow and is_active()
        for path in logs_of(found, rank):
            with readable(found.location):
                written = found.location.open().read(path)
            prefix = "" if rank is not None else f"({_label(path)}) "
            # A line that isn't finished yet is printed with its rest.
            end = written.rfind(b"\n") + 1 if is_running else len(written)
            for line in _lines(written[seen.get(path, 0) : end]):
                shown = rank_line(prefix, line, sys.stdout, is_coloured=is_coloured)
                write_line(shown, sys.stdout)
            seen[path] = end
        if not is_running:
            if not any(seen.values()):
                who = "The ranks have" if rank is None else f"Rank {rank} has"
                echo(f"{who} printed nothing.", err=True)
            return
        time.sleep(_LOOK_EVERY_S)


def logs_of(run: PresentRun, rank: int | None) -> list[str]:
    """Return the paths of a rank's logs in the run's storage, or of all logs.

    In object storage, which can't append, each driver has logs of its own.

    Raises:
        click.ClickException: the run has no such rank, or its storage can't be read.
    """
    from polytrain.output.worker_output import LOGS, log_name

    with readable(run.location):
        there = sorted(path for path in run.location.open().list(LOGS) if path.endswith(".log"))
    if rank is None:
        return there
    own = [path for path in there if path.endswith(f"/{log_name(rank)}")]
    # A rank that has printed nothing has no log, and a run that is starting no ranks.
    ranks = run.history.world_size
    if own or not ranks or rank < ranks:
        return own
    raise click.ClickException(
        f"--rank: the run has no rank {rank}. It has {ranks}, counted from 0"
    )


def _lines(written: bytes) -> list[str]:
    """The lines of a log, as a terminal would have shown them: of a progress bar the last state."""
    from polytrain.output.line_layout import LineBuffer

    buffer = LineBuffer()
    lines = buffer.feed(written.decode(errors="replace"))
    rest = buffer.take_rest()
    return [*lines, rest] if rest else lines


def _label(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".log").replace("_", " ")
