"""What a run does until it ends, from its storage: whichever process is its driver."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from polytrain.errors import Failure
from polytrain.output.echo import echo, echo_lines, is_gone
from polytrain.record.entries import (
    AttemptEnded,
    Closed,
    Entry,
    Launched,
    MetricsReported,
    Opened,
    ReportBlock,
    RunConcluded,
)
from polytrain.record.history import JOURNAL
from polytrain.record.ledger import Ledger
from polytrain.record.lines import new_reports
from polytrain.run.lease import holder
from polytrain.view.cli.found import readable
from polytrain.view.present import PresentRun
from polytrain.view.progress.display import shown_progress
from polytrain.view.progress.text import command
from polytrain_plugins import RunInfo, Stopped


def tail_of(entries: Iterable[Entry]) -> JournalTail:
    """Return the tail of a journal from where the run was last started over."""
    lines, skipped, token = 0, 0, -1
    for entry in entries:
        if isinstance(entry, MetricsReported | ReportBlock):
            continue
        if isinstance(entry, Opened) and entry.anew:
            skipped, token = lines, entry.token
        lines += 1
    return JournalTail(skipped=skipped, token=token)


class JournalTail:
    """Takes a journal again and again, each time from its start, and yields what it hasn't yet."""

    def __init__(self, *, skipped: int = 0, token: int = -1) -> None:
        """
        Args:
            skipped: lines, without those of reports, that belong to an earlier run.
            token: fencing token of the first driver that counts.
        """
        self.ledger = Ledger()
        """Of all that was yielded: it has each line before that is."""

        self._taken = skipped
        self._token = token
        self._reports: dict[int, int] = {}
        """Fencing token of a driver → how many of its reports are known."""

    def news(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the new lines, in order. Of many reports in one line the last is yielded."""
        lines = 0
        for entry in entries:
            if isinstance(entry, MetricsReported | ReportBlock):
                if entry.rank == 0:
                    yield from self._new_reports(entry)
                continue
            lines += 1
            if lines > self._taken and entry.token >= self._token:
                self._token = entry.token
                self.ledger.take(entry)
                yield entry
        self._taken = max(self._taken, lines)

    def _new_reports(self, entry: MetricsReported | ReportBlock) -> Iterator[Entry]:
        token = entry.token
        new = new_reports(entry, self._reports.get(token, 0))
        if new is None or token < self._token:
            return
        self._reports[token] = new.behind
        if isinstance(entry, MetricsReported):
            self.ledger.take(entry)
            yield entry
            return
        steps = new.reports.steps()
        self.ledger.take_reports(new.times, steps, new.stalled_s, new.copied_s, start=new.start)
        yield MetricsReported(
            time=new.times[-1],
            token=token,
            n=new.behind - 1,
            step=int(steps[-1]),
            metrics=new.reports[-1],
        )


_LOOK_EVERY_S = 1.0

_SHARE = 0.1
"""Greatest share of the time that is spent on reading the journal."""


def followed(run: PresentRun, *, as_json: bool) -> None:
    """Print what a run has done and does, as its driver would, until it ends.

    Args:
        as_json: whether to print JSON Lines.

    Raises:
        click.ClickException: its storage can't be read.
        BrokenPipeError: nobody reads what is printed.
    """
    info = RunInfo(
        name=run.location.name,
        backend=run.history.identity["backend"],
        num_workers=run.history.world_size,
        path=run.location.address,
        cluster=run.history.configuration.cluster,
    )
    tail = tail_of(run.entries())
    mode = "json" if as_json else "auto"
    failure: Failure | None = None
    is_closed = is_over = False
    driver = _Driver(run)
    with shown_progress(
        info, mode, tail.ledger, sys.stdout, now=driver.now, is_over=lambda: is_over
    ) as show:
        for entries in _readings(run, driver):
            for entry in tail.news(entries):
                show(entry)
                is_closed = isinstance(entry, Closed)
                match entry:
                    case AttemptEnded():
                        failure = entry.failure
                    case Launched() | RunConcluded(stopped=Stopped()):
                        failure = None
            if is_closed:
                break
        # Not after Ctrl-C, or if nobody reads any more: the run continues.
        is_over = True
    if failure is not None and not as_json:
        # Here nobody raises what ended the run.
        where = "" if failure.rank is None else f"rank {failure.rank}: "
        echo_lines(f"{where}{failure.message}")
        echo(f"To see more: {command(info, failure)}")


class _Driver:
    """The driver of a run, as far as its lease says."""

    def __init__(self, run: PresentRun) -> None:
        self._storage = run.location.open()
        self._lease = run.holder

    def now(self) -> float:
        """Return the time on the clock of its journal."""
        return time.time() if self._lease is None else self._lease.now()

    def is_running(self) -> bool:
        self._lease = holder(self._storage)
        return self._lease is not None and self._lease.is_held is not False


def _readings(run: PresentRun, driver: _Driver) -> Iterator[Iterator[Entry]]:
    """Yield the journal's lines whenever there are new ones, until the run has ended.

    Raises:
        BrokenPipeError: nobody reads any more what this process prints.
    """
    written: Mapping[str, int] | None = None
    storage = run.location.open()
    while True:
        with readable(run.location):
            # Before the journal is read: what a driver writes before it dies is read, too.
            is_held = driver.is_running()
            before, written = written, storage.log_state(JOURNAL)
            began = time.monotonic()
            if written != before:
                yield run.entries()
        if not is_held:
            return
        if is_gone(sys.stdout):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        time.sleep(max(_LOOK_EVERY_S, (time.monotonic() - began) / _SHARE))
