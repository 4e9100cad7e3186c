"""The line of progress that a person sees, and the worker processes' own output beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.status import Status

from polytrain.common.output import Output
from polytrain_plugins import Attempt, CheckpointInfo, Outcome, Report, RunInfo, hookimpl

_SHOWN_METRICS = 4


class ProgressLine:
    """An observer: on a terminal a line that changes in place; elsewhere one for each happening."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._saved = ""

    @hookimpl
    def polytrain_run_started(self, run: RunInfo) -> None:
        workers = f"{run.num_workers} workers {run.cluster}" if run.num_workers else "inline"
        if self._console.is_terminal:
            self._status = self._console.status(f"{run.name}: starting ({workers})")
            self._status.start()
        else:
            self._print(f"{run.name}: starting ({workers}), in {run.path}")

    @hookimpl
    def polytrain_reported(self, run: RunInfo, report: Report) -> None:
        if self._status is not None:
            told = f"{run.name}: step {report.step}{self._saved}  {_brief(report.metrics)}"
            self._status.update(told)

    @hookimpl
    def polytrain_attempt_ended(self, run: RunInfo, attempt: Attempt, outcome: Outcome) -> None:
        if not outcome.succeeded and not outcome.planned:
            self._print(f"{run.name}: attempt {attempt.number} failed: {outcome.reason}")

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
        if self._status is not None:
            self._status.stop()
        ended = "finished" if outcome.succeeded else "stopped" if outcome.planned else "failed"
        restarts = f", {outcome.restarts} restart(s)" if outcome.restarts else ""
        self._print(f"{run.name}: {ended}{restarts}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class WorkerOutput:
    """Passes on what workers write: to the user with the rank in front, and to a log per rank.

    What they write after something has failed is mostly the noise of broken collectives: it goes
    to the logs alone.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._files: dict[int, IO[str]] = {}
        self._partial: dict[tuple[int, str], str] = {}
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
        for file in self._files.values():
            file.close()

    def write(self, output: Output) -> None:
        """Take some text; whole lines are passed on, the rest waits for its end."""
        self._log(output.rank).write(output.text)
        key = (output.rank, output.stream)
        *lines, rest = (self._partial.get(key, "") + output.text).split("\n")
        self._partial[key] = rest
        for line in lines:
            self._show(output.rank, output.stream, line)

    def flush(self) -> None:
        """Pass on lines that have no end, because their writer is gone."""
        for (rank, stream), rest in self._partial.items():
            if rest:
                self._show(rank, stream, rest)
        self._partial.clear()

    def _show(self, rank: int, stream: str, line: str) -> None:
        if not self.muted:
            target = sys.stdout if stream == "stdout" else sys.stderr
            print(f"(rank {rank}) {line}", file=target, flush=True)

    def _log(self, rank: int) -> IO[str]:
        if rank not in self._files:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (self._logs / f"rank_{rank}.log").open("a", buffering=1)
        return self._files[rank]


def _brief(metrics: Mapping[str, Any]) -> str:
    shown = list(metrics.items())[:_SHOWN_METRICS]
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown
    )
