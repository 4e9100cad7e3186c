"""The run's journal: one JSON line for everything that changes its state, with the reason.

It is only ever appended to, by one driver after another; `history` reads it. Of what rank 0 reports
between two such lines, many reports make one line, in columns. Until they do, each is a draft.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from polytrain.checkpoint.events import PartVoid
from polytrain.checkpoint.manifest import Manifest
from polytrain.errors import Failure
from polytrain.events.attempt import (
    ConditionMet,
    Done,
    Drained,
    Event,
    Exited,
    Failed,
    Joined,
    Reported,
)
from polytrain.functions.return_values import Returned, to_bytes
from polytrain.linux.clock import Clock
from polytrain.policy.validation import Validation
from polytrain.record.configuration import Configuration
from polytrain.record.draft_reports import DraftReports
from polytrain.record.entries import FORMAT
from polytrain.record.ledger import Ledger
from polytrain.record.load_lines import LoadLines
from polytrain.record.reports import Reports
from polytrain.run.actions import Conclude, EndAttempt
from polytrain.run.transition import Transition
from polytrain.storage.failure import storage_errors
from polytrain.storage.protocol import Log, Storage
from polytrain.text import strict_json
from polytrain_plugins import Member

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"

_FULL = 4096
"""Reports that make a line."""

_UNSYNCED = 4 << 20
"""Bytes in memory alone that are worth a sync."""


_NOTED_S = 1.0
"""Least change of the machine's clock that is noted: smaller ones are corrections."""


class Journal:
    """Appends events to the journal. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        *,
        token: int,
        ledger: Ledger,
        reports: Reports | None = None,
        of_other_ranks: Mapping[int, Reports] | None = None,
        follow: Callable[[Mapping[str, Any]], None] = lambda entry: None,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            storage: the run's storage.
            token: fencing token of this driver's lease, which is in every line.
            ledger: the ledger of the journal so far, which is kept up to date.
            reports: what was reported so far and no restart has undone, which is too.
            of_other_ranks: the same of ranks above 0, by rank.
            follow: called with each line, once the ledger has it, but with no report of ranks
                above 0. It must not raise.
            clock: what each line's time is read from; began with this journal by default.
        """
        self._follow = follow
        self.ledger = ledger
        self.clock = Clock() if clock is None else clock
        self.reports = Reports() if reports is None else reports
        self.of_other_ranks = defaultdict(Reports, of_other_ranks or {})
        self._storage = storage
        self._log: Log = storage.open_log(JOURNAL, series=f"{token:06d}")
        self._token = token
        self._lock = threading.Lock()
        self._drafts = DraftReports()
        self._drafts_of_ranks: dict[int, DraftReports] = {}
        self._loads = LoadLines()
        self._ahead_s = 0.0
        """How far the machine's clock is ahead, as far as it is noted."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with self._lock:
                self._append("")
            self._log.__exit__(kind, error, traceback)
        except OSError as unwritten:
            # Important lines are synced earlier, and another error ends the run here.
            logger.warning("The end of the journal can't be written: %s", unwritten)

    def opened(
        self,
        *,
        anew: bool,
        identity: Mapping[str, Any],
        world_size: int,
        ranking: tuple[str | None, str] = (None, "max"),
        total_steps: int | None = None,
        time_budget_s: float | None = None,
        stop_function: str | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        """Note that a driver has started.

        Args:
            anew: whether the run is started over.
            identity: the run's identity.
            world_size: number of ranks.
            ranking: the metric that ranks checkpoints, and its order.
            total_steps: the most steps of the whole run; None if that is unknown.
            time_budget_s: seconds of training that end the run; None if none do.
            stop_function: fingerprint of the function in `RunConfig.stop`.
            configuration: what people look up of it; nothing depends on it.
        """
        self._write(
            "Opened",
            format=FORMAT,
            anew=anew,
            identity=identity,
            world_size=world_size,
            began=self.clock.began,
            ranking=ranking,
            total_steps=total_steps,
            time_budget_s=time_budget_s,
            stop_function=stop_function,
            configuration=configuration and asdict(configuration),
        )
        self.sync()

    def committed(self, manifest: Manifest) -> None:
        """Note a commit: a restart resumes from this checkpoint."""
        self._write("Committed", checkpoint=manifest.directory, step=manifest.step)

    def void(self, part: PartVoid) -> None:
        """Note that a checkpoint is dropped."""
        self._write(
            "PartVoid",
            attempt=part.attempt,
            checkpoint=part.checkpoint,
            rank=part.rank,
            reason=part.reason,
        )

    def validation_requested(self, validation: Validation) -> None:
        """Note that a checkpoint is to be validated, once it is committed."""
        self._write(
            "ValidationRequested",
            checkpoint=validation.checkpoint,
            step=validation.step,
            task=validation.task,
        )

    def validation_ended(self, ended: Validation, *, traceback: str) -> None:
        """Note what has become of a validation; its metrics are in the history from now on."""
        self._write(
            "ValidationEnded",
            checkpoint=ended.checkpoint,
            step=ended.step,
            status=ended.status.value,
            metrics=ended.metrics,
            reason=ended.reason,
            traceback=traceback,
        )
        self.reports.merge(ended.step, ended.metrics)

    def transition(self, event: Event | None, transition: Transition) -> None:
        """Note a transition, unless it has no reason: then nothing changed."""
        if isinstance(event, ConditionMet):
            self._write("ConditionMet", attempt=event.attempt, stopped=asdict(event.stopped))
        if transition.reason:
            self._write(
                _name(event),
                phase=type(transition.state.phase).__name__,
                attempt=transition.state.attempt,
                reason=transition.reason,
                **_measured(event),
                **_place(event),
            )

    def launched(
        self,
        *,
        attempt: int,
        step: int,
        start: str | None,
        world_size: int,
        members: Sequence[Member] = (),
    ) -> None:
        """Note that an attempt starts.

        Args:
            attempt: the attempt's number.
            step: the step that it resumes from; later steps are reported again.
            start: the checkpoint that it resumes from.
            world_size: number of ranks.
            members: every rank's place, in rank order.
        """
        self._write(
            "Launched",
            attempt=attempt,
            step=step,
            start=start,
            world_size=world_size,
            hosts=[member.host for member in members],
            gpus=[member.gpus for member in members],
        )
        # What came after the checkpoint is done, and reported, once more.
        for reports in (self.reports, *self.of_other_ranks.values()):
            reports.drop_after(step)

    def started(self, *, attempt: int) -> None:
        """Note that every rank's process is requested: data and starting point are on the nodes."""
        self._write("Started", attempt=attempt)

    def attempt_ended(
        self, ended: EndAttempt, *, host: str = "", last_lines: Sequence[str] = ()
    ) -> None:
        """Note that an attempt ended early; it has no failure if that was planned.

        Args:
            ended: why.
            host: that of the rank whose failure it is; empty if that isn't known.
            last_lines: the end of that rank's output.
        """
        self._write_loads()
        root = ended.root
        failure = root and {
            "kind": root.kind.name,
            "rank": root.rank,
            "host": host,
            "step": root.step,
            "message": root.message,
            "traceback": root.traceback,
            "output": root.output,
            "last_lines": list(last_lines),
            "stacks": {str(rank): stack for rank, stack in root.stacks.items()},
        }
        self._write("AttemptEnded", attempt=ended.attempt, failure=failure, reason=ended.reason)

    def reported(self, report: Reported) -> None:
        """Note a report of rank 0."""
        step, metrics = report.step, report.metrics
        self._note_clock()
        entry = self._entry(
            "Reported", n=self._drafts.written, step=step, metrics=metrics, **_measured(report)
        )
        self.ledger.take(entry)
        self.reports.add(step, metrics)
        line = strict_json.dumps(entry) + "\n"
        with self._lock, storage_errors():
            self._drafts.add(entry, line)
            if len(self._drafts) < _FULL:
                self._log.draft(line)
            else:
                self._append("")
        self._follow(entry)

    def rank_reported(self, report: Reported) -> None:
        """Note a report of a rank above 0. The ledger counts those of rank 0."""
        rank, step, metrics = report.rank, report.step, report.metrics
        self.of_other_ranks[rank].add(step, metrics)
        with self._lock, storage_errors():
            drafts = self._drafts_of_ranks.setdefault(rank, DraftReports(rank=rank))
            entry = self._entry(
                "RankReported", rank=rank, n=drafts.written, step=step, metrics=metrics
            )
            line = strict_json.dumps(entry) + "\n"
            drafts.add(entry, line)
            if len(drafts) < _FULL:
                self._log.draft(line)
            else:
                self._append("")

    def stacks_dumped(self, *, attempt: int, reason: str, stacks: Mapping[int, str]) -> None:
        """Note the stacks of all ranks, and why they were dumped."""
        by_rank = {str(rank): text for rank, text in stacks.items()}
        self._write("StacksDumped", attempt=attempt, reason=reason, stacks=by_rank)

    def straggler(self, *, attempt: int, rank: int, host: str, reason: str) -> None:
        """Note a straggler."""
        self._write("Straggler", attempt=attempt, rank=rank, host=host, reason=reason)

    def load(
        self, *, attempt: int, window: int, busy: Sequence[float], memory: Sequence[int]
    ) -> None:
        """Note how busy the ranks were in one window, and the memory of their processes.

        The more ranks, the more windows make one line. Followers get each window.

        Args:
            attempt: the attempt's number.
            window: the window's, from 0.
            busy: each rank's share, between 0 and 1.
            memory: each rank's, in bytes.
        """
        shares, now = [round(share, 2) for share in busy], self.clock.now()
        its: Mapping[str, Any] = {
            "attempt": attempt,
            "window": window,
            "busy": shares,
            "memory": list(memory),
        }
        line = self._loads.add(**its, now=now)
        if line is None:
            self._follow(self._entry("Load", **its))
        else:
            self._write("Load", **line)

    def _write_loads(self) -> None:
        """Write the windows of an attempt that ends, and that no line has yet."""
        line = self._loads.rest()
        if line is not None:
            self._write("Load", **line)

    def concluded(self, conclusion: Conclude) -> None:
        """Note that the run has ended, or that this driver has stopped working on it."""
        self._write_loads()
        failure = conclusion.validation_failure
        self._write(
            "Concluded",
            succeeded=conclusion.succeeded,
            stopped=None if conclusion.stopped is None else asdict(conclusion.stopped),
            reason=conclusion.reason,
            **({"validation_failure": failure} if failure else {}),
        )
        self.sync()

    def returned(self, values: Sequence[Returned | None]) -> None:
        """Store what the training functions have returned, beside the journal, and note it.

        Args:
            values: each rank's; empty if no rank has returned anything.

        Raises:
            StorageError: it can't be written.
        """
        if not values:
            return
        file = f"return_values-{self._token:06d}.msgpack"
        with storage_errors():
            self._storage.write(file, to_bytes(values))
        self._write("Returned", file=file)

    def closed(self) -> None:
        """Note that this driver has released all resources.

        Never raises, because an error here must not change the result.
        """
        try:
            self._write("Closed")
        except OSError as unwritten:
            logger.warning("The end of the journal can't be written: %s", unwritten)

    def sync(self) -> None:
        """Return once all lines survive a crash of this machine.

        Raises:
            StorageError: it can't be written.
        """
        with storage_errors():
            with self._lock:
                self._append("")
            self._log.sync()

    @property
    def wants_sync(self) -> bool:
        """Whether much of it is in this process's memory alone."""
        return self._log.unsynced > _UNSYNCED

    def _note_clock(self) -> None:
        """Note by how much the machine's clock was set, or how long it was suspended."""
        with self._lock:
            by_s = self.clock.ahead_s() - self._ahead_s
            if abs(by_s) < _NOTED_S:
                return
            self._ahead_s += by_s
        logger.warning(
            "This machine's clock was set by %+.0f s, or the machine was suspended. The times of "
            "the run are counted without that.",
            by_s,
        )
        self._write("ClockChanged", by_s=round(by_s, 3))

    def _write(self, event: str, **fields: Any) -> None:
        # A driver's first line is `Opened`.
        if event != "Opened":
            self._note_clock()
        entry = self._entry(event, **fields)
        self.ledger.take(entry)
        with self._lock, storage_errors():
            self._append(strict_json.dumps(entry) + "\n")
        self._follow(entry)

    def _entry(self, event: str, **fields: Any) -> dict[str, Any]:
        return {"time": self.clock.now(), "token": self._token, "event": event, **fields}

    def _append(self, line: str) -> None:
        """Append the drafts, for good, and a line."""
        drafts = [self._drafts, *self._drafts_of_ranks.values()]
        self._drafts = self._drafts.next()
        self._drafts_of_ranks = {rank: it.next() for rank, it in self._drafts_of_ranks.items()}
        text = "".join(each.text(self._token) for each in drafts) + line
        if text:
            self._log.write(text)


def _name(event: Event | None) -> str:
    if event is None:
        return "Begun"
    # What meets a condition has a line of its own.
    return "DrainWanted" if isinstance(event, ConditionMet) else type(event).__name__


def _measured(event: Event | Reported | None) -> dict[str, float]:
    """Return the durations in an event, for the ledger."""
    match event:
        case (
            Reported(rank=0, stalled_s=s) | Done(rank=0, stalled_s=s) | Drained(rank=0, stalled_s=s)
        ):
            measured = {"stalled_s": s}
        case Exited(since_s=s) | Failed(failure=Failure(since_s=s)):
            measured = {"since_s": s}
        case _:
            measured = {}
    return {name: round(seconds, 6) for name, seconds in measured.items() if seconds}


def _place(event: Event | None) -> Mapping[str, Any]:
    """Return where a rank is that has joined, and its rows."""
    if not isinstance(event, Joined):
        return {}
    known = {"rows": event.rows, "device": event.device, "node": event.node}
    return {"rank": event.rank, **{name: value for name, value in known.items() if value}}
