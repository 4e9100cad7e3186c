"""Publishes the events of a run: reports and returned values to its journal, all to observers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from polytrain.errors import Failure
from polytrain.events.attempt import Done, ExactnessFound, Reported, StateDigested
from polytrain.functions.return_values import Returned
from polytrain.output.observers import Observers
from polytrain.output.worker_output import WorkerOutput
from polytrain.record.entries import DigestsKept, ExactnessChecked
from polytrain.record.journal import Journal
from polytrain.run.background_tasks import BackgroundTasks
from polytrain_plugins import Attempt, FailureInfo, Outcome, Report, RunInfo, Stopped

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Publishes the reports and the attempts of a run."""

    run: RunInfo
    journal: Journal
    observers: Observers
    background_tasks: BackgroundTasks
    output: WorkerOutput
    keeps_all_reports: bool = False
    """Whether the journal keeps the reports of ranks above 0."""

    _attempt: Attempt = field(
        default_factory=lambda: Attempt(number=0, checkpoint=None, num_workers=0)
    )
    _digested: tuple[str, ...] = ()
    """The tensors of the last digests."""

    _exactness: set[str] = field(default_factory=set)
    """What this attempt's ranks have found of virtual workers."""

    _returned: dict[int, Returned] = field(default_factory=dict)
    """Return values of this attempt's training functions, by rank."""

    _is_syncing: bool = False

    def run_started(self) -> None:
        """Publish that the run starts."""
        self.observers.run_started(self.run)

    def attempt_started(self, attempt: Attempt) -> None:
        """Publish that an attempt starts."""
        self._attempt = attempt
        self._exactness.clear()
        self._returned.clear()
        self.observers.attempt_started(self.run, attempt)

    def reported(self, report: Reported) -> None:
        """Publish a report: rank 0's goes to the history and to all observers."""
        public = Report(
            rank=report.rank,
            attempt=report.attempt,
            step=report.step,
            metrics=report.metrics,
            time=report.at,
        )
        self.observers.rank_reported(self.run, public)
        is_kept = report.rank == 0 or self.keeps_all_reports
        self.journal.report(report, is_kept=is_kept)
        if not is_kept:
            return
        if self.journal.wants_sync and not self._is_syncing:
            self._is_syncing = True
            self.background_tasks.submit(self._sync, attempt=report.attempt)
        if report.rank == 0:
            self.observers.reported(self.run, public)

    def done(self, done: Done) -> None:
        """Keep what a rank's training function has returned."""
        if done.returned is None:
            return
        self._returned[done.rank] = done.returned
        if done.returned.kind == "lost":
            logger.warning("What rank %d has returned isn't kept: %s", done.rank, done.returned.why)

    @property
    def returned(self) -> tuple[Returned | None, ...]:
        """Return value of each rank's training function; empty if none returned anything."""
        if not self._returned:
            return ()
        return tuple(self._returned.get(rank) for rank in range(self._attempt.num_workers))

    def digested(self, digested: StateDigested) -> None:
        """Keep digests of rank 0's state."""
        names = tuple(digested.digests)
        self.journal.write(
            DigestsKept(
                step=digested.step,
                names=() if names == self._digested else names,
                digests="".join(digested.digests.values()),
            )
        )
        self._digested = names

    def checked_exactness(self, found: ExactnessFound) -> None:
        """Keep what a rank has found of virtual workers, unless another one has found the same."""
        if found.why_not not in self._exactness:
            self._exactness.add(found.why_not)
            self.journal.write(ExactnessChecked(attempt=found.attempt, why_not=found.why_not))

    def attempt_ended(
        self,
        *,
        succeeded: bool,
        planned: bool,
        reason: str,
        failures: tuple[Failure, ...] = (),
        stopped: Stopped | None = None,
    ) -> None:
        """Publish that the attempt has ended; the arguments are those of `Outcome`."""
        outcome = Outcome(
            succeeded=succeeded,
            planned=planned,
            reason=reason,
            restarts=self.journal.history.ledger.restarts,
            failures=self.failure_infos(failures),
            stopped=stopped,
        )
        self.observers.attempt_ended(self.run, self._attempt, outcome)

    def failure_infos(self, failures: tuple[Failure, ...]) -> tuple[FailureInfo, ...]:
        """Return failures in the form for observers."""
        return tuple(
            FailureInfo(
                kind=failure.kind.value,
                rank=failure.rank,
                message=failure.message,
                step=failure.step,
                traceback=failure.traceback,
                log=self.output.log_of(failure),
                pickled=failure.error,
            )
            for failure in failures
        )

    def _sync(self) -> None:
        """Sync the journal, so that its lines survive this process; run in the background."""
        try:
            self.journal.sync()
        finally:
            self._is_syncing = False
