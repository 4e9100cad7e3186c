"""Passes worker processes' output to the user's streams, and to a log for each rank."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from polytrain.errors import Failure, FailureKind
from polytrain.events.output import BarMoved, Output
from polytrain.output.call_queues import CallQueues
from polytrain.output.echo import are_one, has_colours, rank_line, without_colours, write_line
from polytrain.output.line_layout import LineBuffer
from polytrain.output.rank_log import RankLog
from polytrain.storage.beneath import Beneath
from polytrain.storage.calls import StorageHealth
from polytrain.storage.location import Location
from polytrain.text.described import shortened

LOGS = "logs"
"""The directory of logs in a run's storage."""

_LAST_LINES = 10
_LONGEST_LAST = 2000
"""Characters of each of them: they stand in errors, and the log has all."""

_OPEN_LOGS = 128
"""Logs that are open at once. Thousands of ranks may write, and a process may often open no more
than 1024 files."""

_LOG_STUCK_AFTER_S = 5.0

_OVERHEAD = 200
"""Bytes of overhead of each waiting text."""

logger = logging.getLogger(__name__)


class LiveBars:
    """The bars of each rank. One thread notes them, another shows them."""

    def __init__(self) -> None:
        self.are_shown = False
        """Whether somebody shows them; else nobody has to say how they move."""

        self._lock = threading.Lock()
        self._rows: dict[int, tuple[str, ...]] = {}

    def put(self, rank: int, rows: tuple[str, ...]) -> None:
        """Note a rank's bars, from the top; no rows if it has none any more."""
        with self._lock:
            if rows:
                self._rows[rank] = rows
            else:
                self._rows.pop(rank, None)

    def clear(self) -> None:
        """Forget all bars: their writers are gone."""
        with self._lock:
            self._rows.clear()

    def rows(self) -> list[tuple[int, str]]:
        """Return all bars with their ranks, in the order of the ranks."""
        with self._lock:
            return [(rank, row) for rank, rows in sorted(self._rows.items()) for row in rows]


class WorkerOutput:
    """Shows the workers' output to the user, prefixed with the rank, and appends it to their logs.

    Output after a failure is mostly noise of broken collectives: it goes only to the logs.

    Output never fails a run: if a stream's reader is gone, or a log can't be written in time, one
    warning says so. If nobody reads for long, output is dropped, and a line says so.
    """

    def __init__(
        self,
        logs: Path,
        *,
        retry_s: float,
        health: StorageHealth | None = None,
        address: str = "",
        show: Literal["all", "rank_0", "none"] = "all",
        queues: CallQueues | None = None,
        bars: LiveBars | None = None,
    ) -> None:
        """
        Args:
            retry_s: seconds for which text is kept if its log can't be written.
            health: of the run's storage, if the logs are in it.
            address: place of the logs after the end of the run; by default the same directory.
            queues: queues for writes to logs and streams, so that nobody waits for these; by
                default they are written directly.
        """
        self.retry_s = retry_s
        self._health = StorageHealth() if health is None else health
        self._logs = logs
        self._address = address or str(logs)
        self._shown_ranks = {"all": None, "rank_0": {0}, "none": set[int | None]()}[show]
        self._files: dict[int | None, RankLog] = {}
        self._open: dict[RankLog, None] = {}
        """Logs that may be open, the one that was written last at the end. Only writes use it."""

        self._partial: defaultdict[tuple[int | None, str], LineBuffer] = defaultdict(LineBuffer)
        self._last: defaultdict[int | None, deque[str]] = defaultdict(
            lambda: deque(maxlen=_LAST_LINES)
        )
        self._queues = CallQueues(at_once=True) if queues is None else queues
        self._of_the_logs = self._queues.of(self, left_out=self._warn_of_logs)
        self._bars = LiveBars() if bars is None else bars
        self._coloured: dict[str, tuple[TextIO, bool]] = {}
        """Name of a stream → the one that has this name now, and whether it has colours."""

        self._warned: set[str] = set()
        self.muted = False

    def __enter__(self) -> WorkerOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        logs, limit_s = self._of_the_logs, self.retry_s + _LOG_STUCK_AFTER_S
        # Wait less for a write that hangs than for one that fails and is retried.
        is_written = logs.finish(stuck_after_s=_LOG_STUCK_AFTER_S, within_s=limit_s)
        logs.submit(self._close_logs)
        if not (is_written and logs.finish(stuck_after_s=limit_s, within_s=limit_s)):
            logger.warning(
                "The end of what workers wrote may be missing in the logs in %s: they take too "
                "long to be written.",
                self._logs,
            )

    def write(self, output: Output) -> None:
        """Log text, and show its complete lines; an incomplete line waits for its end."""
        log = self._log(output.rank)
        self._of_the_logs.submit(
            lambda: self._append(log, output.text), size=len(output.text) + _OVERHEAD
        )
        for line in self._partial[output.rank, output.stream].feed(output.text):
            self._show(output.rank, output.stream, line)

    def show_bars(self, moved: BarMoved) -> None:
        """Show a rank's progress bars as they are now, in place of those before."""
        if not (self.muted or self._is_hidden(moved.rank)):
            self._bars.put(moved.rank, moved.rows)

    def log_traceback(self, failure: Failure) -> None:
        """Append a rank's traceback to its log: the rank has sent it, and hasn't printed it."""
        if not failure.traceback or (failure.rank is None):
            return
        text = f"\n{failure.traceback.rstrip()}\n"
        log = self._log(failure.rank)
        self._of_the_logs.submit(lambda: self._append(log, text), size=len(text) + _OVERHEAD)

    def log_of(self, failure: Failure) -> str:
        """Return the path or address of the log of what failed; empty if it has written nothing."""
        is_there = _is_of_process(failure) and failure.rank in self._files
        return f"{self._address}/{log_name(failure.rank)}" if is_there else ""

    def begin_attempt(self) -> None:
        """End muting, and forget the last lines of earlier attempts."""
        self.flush()
        self.muted = False
        self._last.clear()

    def last_lines(self, failure: Failure) -> tuple[str, ...]:
        """Return the last lines of the output of what failed that weren't muted."""
        return tuple(self._last.get(failure.rank, ())) if _is_of_process(failure) else ()

    def flush(self) -> None:
        """Show unfinished lines, because their writer is gone."""
        for (rank, stream), buffer in self._partial.items():
            # The place of a bar that is gone is blank.
            if (rest := buffer.take_rest()).strip():
                self._show(rank, stream, rest)
        self._partial.clear()
        self._bars.clear()

    def _is_hidden(self, rank: int | None) -> bool:
        return self._shown_ranks is not None and rank not in self._shown_ranks

    def _show(self, rank: int | None, stream: str, line: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        # A validation (rank None) isn't a peer of the lost process: don't mute it.
        is_muted = self.muted and rank is not None
        if not is_muted:
            self._last[rank].append(shortened(without_colours(line), _LONGEST_LAST))
        # A program without a terminal may have neither stream.
        if target is None or self._is_hidden(rank) or is_muted:
            return
        known = self._coloured.get(stream)
        if known is None or known[0] is not target:
            known = self._coloured[stream] = (target, has_colours(target))
        shown = rank_line(f"({_name(rank)}) ", line, target, is_coloured=known[1])
        self._queues.of(target).submit(
            partial(self._print, stream, target, shown), size=len(shown) + _OVERHEAD
        )

    def _print(self, stream: str, target: TextIO, line: str) -> None:
        try:
            write_line(line, target)
        except (OSError, ValueError) as error:
            self._warn(
                stream,
                f"What workers write can't be shown ({stream}: {error}). The run continues, and "
                f"it is in {self._logs}.",
            )

    def _warn_of_log(self, rank: int | None, error: OSError) -> None:
        self._warn(
            f"log of {_name(rank)}",
            f"What {_name(rank)} writes can't be kept in {self._logs}, and some of it will be "
            f"missing there: {error}. The run continues.",
        )

    def _warn_of_logs(self, count: int) -> None:
        self._warn(
            "logs",
            f"{count} pieces of output are missing in {self._logs}: they couldn't be written as "
            "fast as they came. The run continues.",
        )

    def _append(self, log: RankLog, text: str) -> None:
        """Append text to a log, and close the one that has waited longest if too many are open."""
        log.write(text, retry_s=self.retry_s)
        self._open.pop(log, None)
        self._open[log] = None
        if len(self._open) > _OPEN_LOGS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.release()

    def _close_logs(self) -> None:
        deadline = time.monotonic() + self.retry_s
        for file in self._files.values():
            file.close(deadline=deadline, health=self._health)

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", message)

    def _log(self, rank: int | None) -> RankLog:
        if rank not in self._files:
            path = self._logs / log_name(rank)
            self._files[rank] = RankLog(path, warn=partial(self._warn_of_log, rank))
        return self._files[rank]


def _name(rank: int | None) -> str:
    """Name the writer of some output."""
    return "validation" if rank is None else f"rank {rank}"


def _is_of_process(failure: Failure) -> bool:
    """Return whether a process that writes has failed: a rank, or a validation."""
    return failure.rank is not None or failure.kind is FailureKind.VALIDATION


def log_name(rank: int | None) -> str:
    """Return the name of a rank's log, or of that of the validations."""
    return f"{_name(rank).replace(' ', '_')}.log"


@contextlib.contextmanager
def opened_output(
    location: Location,
    *,
    token: int,
    show: Literal["all", "rank_0", "none"],
    queues: CallQueues,
    bars: LiveBars,
) -> Iterator[WorkerOutput]:
    """Open the output of a run's workers. At the end the logs are in the run's storage.

    Args:
        token: the fencing token of the driver's lease.
    """
    # Object storage can't append, so each driver has its own logs there.
    name = LOGS if location.is_local else f"{LOGS}/{token:06d}"
    with contextlib.ExitStack() as stack:
        if location.is_local:
            logs = Path(location.address, name)
        else:
            prefix = "polytrain-logs-"
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)), LOGS)
        address = f"{location.address}/{name}"
        output = WorkerOutput(
            logs,
            retry_s=location.retry_s,
            health=location.health if location.is_local else None,
            address=address,
            show=show,
            queues=queues,
            bars=bars,
        )
        if not location.is_local:
            stack.callback(_store_logs, logs, location, name, output)
        yield stack.enter_context(output)


def _store_logs(logs: Path, location: Location, directory: str, output: WorkerOutput) -> None:
    """Store the logs in a local directory, with the retry time of one file for all together."""
    deadline = time.monotonic() + output.retry_s
    unstored: dict[str, OSError] = {}
    for name, _ in Beneath(logs).names():
        left_s = max(0.0, deadline - time.monotonic())
        storage = replace(location, retry_s=left_s).open()
        try:
            storage.put(logs / name, f"{directory}/{name}", move=False)
        except OSError as error:
            unstored[name] = error
            if location.health.has_failed:
                # One try for each log would take long.
                break
    for name, why in unstored.items():
        logger.warning("The log %s can't be stored: %s", name, why)
    if unstored:
        _keep(logs)


def _keep(logs: Path) -> None:
    """Copy the logs to where they outlive this process."""
    try:
        kept = Path(tempfile.mkdtemp(prefix="polytrain-unstored-logs-"))
        shutil.copytree(logs, kept, dirs_exist_ok=True)
    except OSError as error:
        logger.warning("The logs can't be kept on this machine either: %s", error)
    else:
        logger.warning("The logs of this run are in %s.", kept)


def is_one_place() -> bool:
    """Return whether this process's standard output and error are one terminal, pipe or file."""
    return are_one(sys.stdout, sys.stderr)
