"""The progress line, and the output of worker processes."""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from polytrain.common.output import Output
from polytrain.ui.lines import LineBuffer
from polytrain.ui.rank_log import RankLog
from polytrain_plugins import Attempt, CheckpointInfo, Outcome, Report, RunInfo, hookimpl

logger = logging.getLogger(__name__)

_SHOWN_METRICS = 4


class ProgressLine:
    """An observer that shows progress: one changing line on a terminal, else a line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._spinner = Spinner("dots", style="status.spinner")
        self._saved = ""

    @hookimpl
    def polytrain_run_started(self, run: RunInfo) -> None:
        workers = f"{run.num_workers} workers {run.cluster}" if run.num_workers else "inline"
        if self._console.is_terminal:
            self._update(f"{run.name}: starting ({workers})")
            self._live = Live(
                self._spinner,
                console=self._console,
                transient=True,
                refresh_per_second=12.5,
                # Lines on the same terminal go above this one; those in a file stay there.
                redirect_stdout=_is_terminal(sys.stdout),
            )
            self._live.start()
        else:
            self._print(f"{run.name}: starting ({workers}), in {run.path}")

    @hookimpl
    def polytrain_reported(self, run: RunInfo, report: Report) -> None:
        if self._live is not None:
            self._update(f"{run.name}: step {report.step}{self._saved}  {_brief(report.metrics)}")

    @hookimpl
    def polytrain_attempt_ended(self, run: RunInfo, attempt: Attempt, outcome: Outcome) -> None:
        if not outcome.succeeded and not outcome.planned:
            log = outcome.failures[0].log if outcome.failures else ""
            where = f". Its output: {log}" if log else ""
            self._print(f"{run.name}: attempt {attempt.number} failed: {outcome.reason}{where}")

    @hookimpl
    def polytrain_attempt_started(self, run: RunInfo, attempt: Attempt) -> None:
        if attempt.number or attempt.checkpoint:
            source = Path(attempt.checkpoint).name if attempt.checkpoint else "the beginning"
            self._print(f"{run.name}: attempt {attempt.number} resumes from {source}")

    @hookimpl
    def polytrain_checkpoint_committed(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        self._saved = f" ({checkpoint.step} saved)"

    @hookimpl
    def polytrain_run_ended(self, run: RunInfo, outcome: Outcome) -> None:
        if self._live is not None:
            self._live.stop()
        ended = "finished" if outcome.succeeded else str(outcome.stopped or "failed")
        restarts = f", {outcome.restarts} restart(s)" if outcome.restarts else ""
        self._print(f"{run.name}: {ended}{restarts}")

    def _update(self, text: str) -> None:
        self._spinner.update(text=Text(text))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class WorkerOutput:
    """Passes the workers' output on: to the user with the rank in front, and to a log per rank.

    What they write after something has failed is mostly the noise of broken collectives: it goes
    to the logs alone.

    None of it decides about a run: a standard output whose reader is gone, and a log that can't be
    written in time, are warned about once.
    """

    def __init__(
        self,
        logs: Path,
        *,
        retry_s: float,
        address: str = "",
        show: Literal["all", "rank_0", "none"] = "all",
    ) -> None:
        """
        Args:
            logs: directory of the logs.
            retry_s: how long text for a log that can't be written is kept.
            address: where the logs are once the run has ended; the same directory by default.
            show: whose output is shown to the user.
        """
        self.retry_s = retry_s
        self._logs = logs
        self._address = address or str(logs)
        self._shown_ranks = {"all": None, "rank_0": {0}, "none": set[int | None]()}[show]
        self._files: dict[int | None, RankLog] = {}
        self._partial: defaultdict[tuple[int | None, str], LineBuffer] = defaultdict(LineBuffer)
        self._warned: set[str] = set()
        self.muted = False

    def __enter__(self) -> WorkerOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.flush()
        deadline = time.monotonic() + self.retry_s
        for file in self._files.values():
            file.close(deadline=deadline)

    def write(self, output: Output) -> None:
        """Take some text; whole lines are passed on, the rest waits for its end."""
        self._log(output.rank).write(output.text, retry_s=self.retry_s)
        for line in self._partial[output.rank, output.stream].feed(output.text):
            self._show(output.rank, output.stream, line)

    def log_of(self, rank: int | None) -> str:
        """Return where a rank's log is; empty if it has written nothing."""
        return f"{self._address}/{_file_of(rank)}" if rank in self._files else ""

    def flush(self) -> None:
        """Pass on lines that have no end, because their writer is gone."""
        for (rank, stream), buffer in self._partial.items():
            if rest := buffer.take_rest():
                self._show(rank, stream, rest)
        self._partial.clear()

    def _show(self, rank: int | None, stream: str, line: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        is_hidden = self._shown_ranks is not None and rank not in self._shown_ranks
        # A validation isn't a peer of what is lost.
        is_muted = self.muted and rank is not None
        # A program without a terminal may have neither.
        if target is None or is_hidden or is_muted:
            return
        try:
            _print(f"({_name(rank)}) {line}", target)
        except (OSError, ValueError) as error:
            self._warn(
                stream,
                f"What workers write can't be shown ({stream}: {error}). The run goes on, and "
                f"it is in {self._logs}.",
            )

    def _warn_of_log(self, rank: int | None, error: OSError) -> None:
        self._warn(
            f"log of {_name(rank)}",
            f"What {_name(rank)} writes can't be kept in {self._logs}, and some of it will be "
            f"missing there: {error}. The run goes on.",
        )

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", message)

    def _log(self, rank: int | None) -> RankLog:
        if rank not in self._files:
            path = self._logs / _file_of(rank)
            self._files[rank] = RankLog(path, warn=partial(self._warn_of_log, rank))
        return self._files[rank]


def _name(rank: int | None) -> str:
    """Name the writer of some output."""
    return "validation" if rank is None else f"rank {rank}"


def _file_of(rank: int | None) -> str:
    return f"{_name(rank).replace(' ', '_')}.log"


def _print(text: str, target: TextIO) -> None:
    try:
        print(text, file=target, flush=True)
    except UnicodeEncodeError as error:
        known = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
        print(known, file=target, flush=True)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _brief(metrics: Mapping[str, Any]) -> str:
    shown = list(metrics.items())[:_SHOWN_METRICS]
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown
    )
