"""`polytrain logs`: what the ranks of a run have printed."""

from __future__ import annotations

import codecs
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import echo, has_colours, is_gone, rank_line, write_line
from polytrain.output.line_layout import LineBuffer
from polytrain.view.cli.found import WholeNumber, active_check, named_run, readable, run_argument

if TYPE_CHECKING:
    from polytrain.storage.location import Location
    from polytrain.view.present import PresentRun

_LOOK_EVERY_S = 0.5

_PIECE = 1 << 20
"""Bytes to read at a time."""


@click.command("logs")
@run_argument
@click.option(
    "--rank", type=WholeNumber(min=0), metavar="N", help="Only this rank's; all of them by default."
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
def command(run: str, rank: int | None, follow: bool) -> None:
    """Print what the ranks of RUN have printed, one rank after another."""
    found = named_run(run)
    tails: dict[str, _Tail] = {}
    is_coloured = has_colours(sys.stdout)
    is_active = active_check(found)
    while True:
        is_running = follow and not is_gone(sys.stdout) and is_active()
        for path in logs_of(found, rank):
            tail = tails.setdefault(path, _Tail(found.location, path))
            prefix = "" if rank is not None else f"({_label(path)}) "
            for line in tail.lines(is_over=not is_running):
                shown = rank_line(prefix, line, sys.stdout, is_coloured=is_coloured)
                write_line(shown, sys.stdout)
        if not is_running:
            if not any(tail.read for tail in tails.values()):
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


class _Tail:
    """A log from where it was last read on, as a terminal would have shown it."""

    def __init__(self, location: Location, path: str) -> None:
        self.read = 0
        """Bytes that were read."""

        self._location = location
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._buffer = LineBuffer()

    def lines(self, *, is_over: bool) -> Iterator[str]:
        """Yield the new lines; of a progress bar the last state.

        Args:
            is_over: whether a line that isn't finished will never be.
        """
        for piece in self._pieces():
            yield from self._buffer.feed(self._decoder.decode(piece))
        if is_over:
            yield from self._buffer.feed(self._decoder.decode(b"", final=True))
            if rest := self._buffer.take_rest():
                yield rest

    def _pieces(self) -> Iterator[bytes]:
        with readable(self._location):
            file = self._opened()
        with file:
            file.seek(self.read)
            while piece := file.read(_PIECE):
                self.read += len(piece)
                yield piece

    def _opened(self) -> io.BufferedIOBase:
        from polytrain.storage.beneath import Beneath

        if self._location.is_local:
            return Beneath(Path(self._location.address)).reading(self._path)
        return io.BytesIO(self._location.open().read(self._path))


def _label(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".log").replace("_", " ")
