"""A run's history, over all its drivers: the one fold of its journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from polytrain.checkpoint.manifest import AttemptId, parse_directory_name
from polytrain.config.configs import CheckpointConfig
from polytrain.events.notices import Rollback
from polytrain.policy.divergence import Divergences
from polytrain.policy.validation import Validation, Validations
from polytrain.record.attempts import Attempts
from polytrain.record.configuration import Configuration
from polytrain.record.entries import (
    AttemptEnded,
    CheckpointCommitted,
    CheckpointDropped,
    DivergenceFound,
    Entry,
    ExactnessChecked,
    Launched,
    MetricsReported,
    Opened,
    ReportBlock,
    RunConcluded,
    StopConditionMet,
    ValidationEnded,
    ValidationRequested,
    ValuesReturned,
    decoded,
    with_code_after,
)
from polytrain.record.ledger import Ledger
from polytrain.record.lines import new_reports
from polytrain.record.reports import Reports
from polytrain.text import strict_json
from polytrain.text.described import first_few, numbered
from polytrain_plugins import Stopped

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReports:
    """Reports that a driver has numbered, and that its journal lacks."""

    rank: int
    after_step: int
    count: int

    def __str__(self) -> str:
        missing = numbered(self.count, "report")
        return f"{missing} of rank {self.rank} after step {self.after_step}"


@dataclass(slots=True)
class JournalDamage:
    """What drivers wrote into a journal, and what can't be read of it."""

    lines: int = 0
    """Lines that can't be read."""

    first_line: int = 0
    """Number of the first of them; 0 if it is unknown."""

    reports: list[MissingReports] = field(default_factory=list)

    def add_line(self, number: int) -> None:
        """Add a line that can't be read."""
        self.first_line = self.first_line or number
        self.lines += 1

    def add(self, other: JournalDamage) -> None:
        """Add the lines of another one."""
        self.first_line = self.first_line or other.first_line
        self.lines += other.lines

    def launched(self, step: int) -> None:
        """Leave out the reports after a step: they are made once more."""
        self.reports = [each for each in self.reports if each.after_step < step]

    def __bool__(self) -> bool:
        return bool(self.lines or self.reports)

    def __str__(self) -> str:
        said = []
        if self.lines == 1 and self.first_line:
            said.append(f"line {self.first_line} can't be read")
        elif self.lines:
            first = f", the first is line {self.first_line}" if self.first_line else ""
            said.append(f"{numbered(self.lines, 'line')} can't be read{first}")
        if self.reports:
            missing = first_few([str(each) for each in self.reports], 3)
            count = sum(each.count for each in self.reports)
            said.append(f"{missing} {'is' if count == 1 else 'are'} missing")
        return f"{JOURNAL} is damaged: {'; '.join(said)}" if said else ""


@dataclass(slots=True)
class RunHistory:
    """The history of a run, from when it was last started over."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    configuration: Configuration = field(default_factory=Configuration)
    """What the last driver was configured with; empty if it is unknown."""

    since_token: int = 0
    """The lease of the first driver."""

    world_size: int = 0
    divided_for: int = 0
    """`max_workers` of the driver by whose division the data are read: the last one that began at
    the run's start. From the first batch that is left out on it stays: places count in it."""

    ranking: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How the last driver ranked checkpoints."""

    attempts: Attempts = field(default_factory=Attempts)
    reports: Reports = field(default_factory=Reports)
    """Every report of rank 0 that no restart has undone."""

    validations: Validations = field(default_factory=Validations)
    """Which checkpoints were to be validated, and what has become of that."""

    of_other_ranks: dict[int, Reports] = field(default_factory=dict)
    """The same of ranks above 0, by rank, if they were kept."""

    succeeded: bool | None = None
    """None until a driver concludes the run."""

    stopped: Stopped | None = None
    """Who stopped the run, and why; None if nobody did."""

    reason: str = ""
    validation_failure: str = ""
    """Why no checkpoint has a score, if every validation failed; else empty."""

    condition: Stopped | None = None
    """The condition that the last attempt met, even if its driver died before the conclusion."""

    stop_function: str | None = None
    """Fingerprint of the last driver's function in `RunConfig.stop`."""

    returned: str | None = None
    """File with what the training functions have returned; None if they returned nothing."""

    ledger: Ledger = field(default_factory=Ledger)
    divergences: Divergences = field(default_factory=Divergences)
    """Which attempts have diverged, and what is left out since."""

    damage: JournalDamage = field(default_factory=JournalDamage)
    """What can't be read of the journal, and so isn't in this history."""

    newest_commit: CheckpointCommitted | None = None
    """The newest checkpoint, which is kept until the next one is committed; None if none is."""

    _token: int = field(default=-1, repr=False)
    """The lease of the last driver."""

    _known: dict[int, int] = field(default_factory=dict, repr=False)
    """Rank → how many reports of the last driver are known."""

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended, and not by a request to stop."""
        return self.succeeded is not None and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped on request: `fit()` resumes it."""
        return self.stopped is not None and not self.stopped.is_final

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The last reported metrics."""
        return self.reports[-1] if self.reports else {}

    @property
    def why_not_exact(self) -> tuple[str, ...] | None:
        """Why the run may not be exact over world sizes; see `Result.why_not_exact`."""
        return self.attempts.why_not_exact(self.reports.last_step)

    def take(self, entry: Entry) -> None:
        """Take the next entry of the journal.

        Leaves out what a driver wrote after another one had taken the run over, and reports that
        come a second time.
        """
        if entry.token < self._token:
            return
        if entry.token > self._token:
            # Each driver numbers its reports, also one whose first line can't be read.
            self._token = entry.token
            self._known.clear()
        if isinstance(entry, MetricsReported):
            self._take_report(entry)
            return
        if isinstance(entry, ReportBlock):
            self._take_block(entry)
            return
        self.ledger.take(entry)
        now_s = self.ledger.wall_s
        match entry:
            case Opened():
                self._opened(entry)
                self.attempts.end(stop_s=now_s)
            case ValuesReturned(file=file):
                self.returned = file
            case Launched(step=step, start=start):
                self.attempts.launched(entry, now_s)
                self._note_division(entry)
                self.divergences.launched(step, start)
                self.returned = self.condition = None
                self.damage.launched(step)
                # What came after the checkpoint is done, and reported, once more.
                for kept in (self.reports, *self.of_other_ranks.values()):
                    kept.drop_after(step)
                self.validations.drop_after(step)
            case CheckpointCommitted():
                self.newest_commit = entry
            case CheckpointDropped():
                self._dropped(entry)
            case ExactnessChecked(why_not=why_not):
                self.attempts.checked(why_not)
            case AttemptEnded():
                self.attempts.end(
                    ended=entry.time, stop_s=now_s, failure=entry.failure, reason=entry.reason
                )
            case RunConcluded():
                self.attempts.end(ended=entry.time, stop_s=now_s, reason=entry.reason)
                self.succeeded, self.reason = entry.succeeded, entry.reason
                self.validation_failure = entry.validation_failure
                self.stopped = entry.stopped
                self.identity = with_code_after(self.identity, entry)
                if self.stopped is not None and self.stopped.is_final:
                    self.condition = self.stopped
            case StopConditionMet(stopped=stopped):
                self.condition = stopped
            case DivergenceFound():
                self.divergences.take(
                    entry.token,
                    Rollback(
                        attempt=entry.attempt,
                        rank=entry.rank,
                        step=entry.step,
                        good_step=entry.good_step,
                        reason=entry.reason,
                        skipped=entry.skipped,
                    ),
                    is_rollback=not entry.only_discards,
                )
            case ValidationRequested():
                self.validations.request(
                    Validation(checkpoint=entry.checkpoint, step=entry.step, task=entry.task)
                )
            case ValidationEnded():
                self._take_validation(entry)

    def _opened(self, opened: Opened) -> None:
        self.identity = opened.identity
        self.configuration = opened.configuration or Configuration()
        self.world_size = opened.world_size
        attribute, order = opened.ranking
        self.ranking = CheckpointConfig(
            checkpoint_score_attribute=attribute, checkpoint_score_order=order
        )
        self.stop_function = opened.stop_function
        self.succeeded, self.stopped, self.reason = None, None, ""
        self.validation_failure = ""

    def _note_division(self, launched: Launched) -> None:
        first_step = next(iter(self.attempts)).first_step
        begins = launched.attempt == 0 and launched.step == first_step
        if begins and not (self.divided_for and self.divergences.skipped):
            self.divided_for = self.world_size

    def _dropped(self, dropped: CheckpointDropped) -> None:
        made_by = AttemptId(token=dropped.token, attempt=dropped.attempt)
        newest = self.newest_commit
        if newest and parse_directory_name(newest.checkpoint) == (dropped.checkpoint, made_by):
            # It was committed before another rank's part of it came.
            self.newest_commit = None

    def _take_report(self, report: MetricsReported) -> None:
        rank = report.rank
        known = self._known.get(rank, 0)
        if report.n < known:
            return
        self._note_missing(rank, report.n - known)
        self._known[rank] = report.n + 1
        self._reports_of(rank).add(report.step, report.metrics)
        if rank == 0:
            self.ledger.take(report)

    def _take_block(self, block: ReportBlock) -> None:
        known = self._known.get(block.rank, 0)
        new = new_reports(block, known)
        if new is None:
            if block.n + block.count > known:
                # How many reports it had shows in the number of the next one.
                self.damage.lines += 1
            return
        self._note_missing(block.rank, block.n - known)
        self._known[block.rank] = new.behind
        self._reports_of(block.rank).extend(new.reports, start=new.start)
        if block.rank == 0:
            steps = new.reports.steps()
            self.ledger.take_reports(new.times, steps, new.stalled_s, new.copied_s, start=new.start)

    def _note_missing(self, rank: int, count: int) -> None:
        if count > 0:
            last_step = self._reports_of(rank).last_step
            self.damage.reports.append(MissingReports(rank=rank, after_step=last_step, count=count))

    def _reports_of(self, rank: int) -> Reports:
        return self.of_other_ranks.setdefault(rank, Reports()) if rank else self.reports

    def _take_validation(self, entry: ValidationEnded) -> None:
        before = self.validations.of(entry.checkpoint)
        if before is None:
            return
        ended = replace(before, status=entry.status, metrics=entry.metrics, reason=entry.reason)
        self.validations.end(ended)
        self.reports.merge(ended.step, ended.metrics)


Kind = TypeVar("Kind", bound=RunHistory)


def read_history(journal: Iterable[bytes]) -> RunHistory | None:
    """Read a journal; None if no driver has opened it.

    Raises:
        RunFormatError: it has another format.
        DamagedFileError: it holds what no driver writes.
    """
    return read_as(RunHistory, journal)


def read_as(kind: type[Kind], journal: Iterable[bytes]) -> Kind | None:
    """Read a journal into a history of this kind; see `read_history`."""
    history: Kind | None = None
    token = -1
    unreadable = JournalDamage()
    for number, entry in _numbered(journal):
        if entry is None:
            unreadable.add_line(number)
            continue
        if isinstance(entry, Opened):
            if history is not None or entry.anew:
                # The last line of a driver that died may be incomplete.
                unreadable = JournalDamage()
            if entry.token >= token:
                token = entry.token
                if history is None or entry.anew:
                    # Without the run's first line, any checkpoint may be one of its own.
                    history = kind(since_token=token if entry.anew else 0)
        if history is not None:
            history.take(entry)
            # Drafts of a driver that died come after its last line.
            if unreadable and not isinstance(entry, MetricsReported | ReportBlock):
                history.damage.add(unreadable)
                unreadable = JournalDamage()
    return history


def entries(journal: Iterable[bytes]) -> Iterator[Entry]:
    """Yield a journal's entries. Lines that can't be read are skipped.

    Raises:
        RunFormatError: it has a format that this version can't read.
        DamagedFileError: it holds what no driver writes.
    """
    return (entry for _, entry in _numbered(journal) if entry is not None)


def last_token(journal: Iterable[bytes]) -> int:
    """Return the highest token in a journal of any format; 0 if it has none."""
    found = (entry["token"] for entry in map(_loaded, _lines(journal)) if entry is not None)
    return max((token for token in found if type(token) is int), default=0)


def _numbered(journal: Iterable[bytes]) -> Iterator[tuple[int, Entry | None]]:
    """Yield the numbers of a journal's lines, with their entries; None for what can't be read."""
    for number, line in enumerate(_lines(journal), 1):
        if line:
            entry = _loaded(line)
            known = None if entry is None else decoded(entry, file=JOURNAL, number=number)
            yield number, known


def _loaded(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds; None if that is no entry."""
    try:
        entry = strict_json.loads_to_show(line)
    except ValueError:
        return None
    is_entry = isinstance(entry, dict) and {"time", "token", "event"} <= entry.keys()
    return entry if is_entry else None


def _lines(journal: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    for piece in journal:
        first, *others = piece.split(b"\n")
        begun.append(first)
        for line in others:
            yield b"".join(begun)
            begun = [line]
    yield b"".join(begun)
