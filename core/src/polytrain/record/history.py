"""Reads a run's history, over all its drivers, from its journal. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from polytrain.config.configs import CheckpointConfig
from polytrain.errors import RunFormatError
from polytrain.policy.validation import Validation, Validations, ValidationStatus
from polytrain.record.configuration import Configuration, configuration_in
from polytrain.record.entries import FORMAT, checked
from polytrain.record.journal import JOURNAL
from polytrain.record.ledger import Ledger
from polytrain.record.reports import Reports, decoded
from polytrain.storage.typed_json import Count, Duration, Seconds, fitting
from polytrain.text import strict_json
from polytrain_plugins import Stopped

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunHistory:
    """The history of a run, from when it was last started over."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """The run's identity."""

    configuration: Configuration = field(default_factory=Configuration)
    """What the last driver was configured with; empty in journals that don't have it."""

    since_token: int = 0
    """The lease of the first driver."""

    world_size: int = 0
    ranking: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How the last driver ranked checkpoints."""

    launches: int = 0
    history: Reports = field(default_factory=Reports)
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
    """The reason of the conclusion."""

    validation_failure: str = ""
    """Why no checkpoint has a score, if every validation failed; else empty."""

    condition: Stopped | None = None
    """The condition that the last attempt met, even if its driver died before the conclusion."""

    stop_function: str | None = None
    """Fingerprint of the last driver's function in `RunConfig.stop`."""

    returned: str | None = None
    """File with what the training functions have returned; None if they returned nothing."""

    ledger: Ledger = field(default_factory=Ledger)

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
        return self.history[-1] if self.history else {}

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take the next entry of the journal. Reports are taken apart from this."""
        match entry["event"]:
            case "Returned":
                self.returned = entry["file"]
            case "Launched":
                self.launches += 1
                self.returned = self.condition = None
                for kept in (self.history, *self.of_other_ranks.values()):
                    kept.drop_after(entry["step"])
            case "Concluded":
                self.succeeded, self.reason = entry["succeeded"], entry["reason"]
                self.validation_failure = entry.get("validation_failure", "")
                self.stopped = entry["stopped"] and Stopped(**entry["stopped"])
                if self.stopped is not None and self.stopped.is_final:
                    self.condition = self.stopped
            case "ConditionMet":
                self.condition = Stopped(**entry["stopped"])
            case "ValidationRequested":
                self.validations.request(
                    Validation(
                        checkpoint=entry["checkpoint"], step=entry["step"], task=entry["task"]
                    )
                )
            case "ValidationEnded":
                self._take_validation(entry)
        self.ledger.take(entry)

    def _take_validation(self, entry: Mapping[str, Any]) -> None:
        before = self.validations.of(entry["checkpoint"])
        if before is None:
            return
        ended = replace(
            before,
            status=ValidationStatus(entry["status"]),
            metrics=entry["metrics"],
            reason=entry["reason"],
        )
        self.validations.end(ended)
        self.history.merge(ended.step, ended.metrics)


History = TypeVar("History", bound=RunHistory)


def read_history(journal: Iterable[bytes]) -> RunHistory | None:
    """Read a journal; None if no driver has opened it.

    Args:
        journal: its content, in pieces.

    Raises:
        RunFormatError: it has another format.
        DamagedFileError: it holds what no driver writes.
    """
    return read_as(RunHistory, journal)


def read_as(kind: type[History], journal: Iterable[bytes]) -> History | None:
    """Read a journal into a history of this kind; None if no driver has opened it.

    Skips incomplete lines of a driver that died, lines that a driver wrote after another one had
    taken the run over, and reports that come a second time.

    Args:
        kind: the kind of history.
        journal: its content, in pieces.

    Raises:
        RunFormatError: it has another format.
        DamagedFileError: it holds what no driver writes.
    """
    run_history: History | None = None
    token = -1
    reports: dict[int, int] = {}
    for entry in entries(journal):
        if entry["token"] < token:
            continue
        if entry["event"] == "Opened":
            token = entry["token"]
            reports = {}
            if run_history is None or entry["anew"]:
                run_history = kind(since_token=token)
            run_history.identity = entry["identity"]
            # Journals of earlier versions don't have it.
            run_history.configuration = configuration_in(entry.get("configuration") or {})
            run_history.world_size = entry["world_size"]
            run_history.ranking = _ranking(entry)
            run_history.stop_function = entry.get("stop_function")
            run_history.succeeded, run_history.stopped, run_history.reason = None, None, ""
        if run_history is None:
            continue
        match entry["event"]:
            case "Reported" | "Reports":
                reports[0] = _take_reports(run_history, entry, reports.get(0, 0))
            case "RankReported" | "RankReports":
                rank = entry["rank"]
                reports[rank] = _take_rank_reports(run_history, entry, reports.get(rank, 0))
            case _:
                run_history.take(entry)
    return run_history


def _ranking(opened: Mapping[str, Any]) -> CheckpointConfig:
    # Journals of earlier drivers may not have it.
    attribute, order = opened.get("ranking", (None, "max"))
    return CheckpointConfig(checkpoint_score_attribute=attribute, checkpoint_score_order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewReports:
    """The reports of rank 0 in one line of a journal."""

    reports: Reports
    times: Sequence[float]
    """When each was taken, in seconds since the epoch."""

    stalled_s: Mapping[int, float] = field(default_factory=dict)
    """Position → rank 0's stall so far, where it isn't that of the report before."""

    start: int
    """The first that isn't known yet."""

    behind: int
    """How many reports of their driver are known with these."""


def new_reports(entry: Mapping[str, Any], known: int) -> NewReports | None:
    """Return the reports in an entry `Reported` or `Reports`; None if there are no new ones.

    A driver that dies may have written them as drafts and for good.

    Args:
        entry: the journal's.
        known: how many reports of its driver are known.
    """
    is_one = entry["event"] == "Reported"
    behind = int(entry["n"] + (1 if is_one else entry["count"]))
    if behind <= known:
        return None
    times: Sequence[float]
    if is_one:
        times, reports = (entry["time"],), Reports()
        reports.add(entry["step"], entry["metrics"])
        return NewReports(reports=reports, times=times, start=0, behind=behind)
    try:
        times = _times(entry)
        stalled_s = dict(
            fitting(list[tuple[Count, Duration]], entry["stalled_s"], file="stalled_s")
        )
        if list(stalled_s) != sorted(stalled_s) or max(stalled_s, default=0) >= len(times):
            raise ValueError("a stall of no report")
        reports = Reports.from_json(entry)
    except (KeyError, ValueError) as error:
        logger.warning("%d reports in the journal are damaged: %s", behind - known, error)
        return None
    start = max(0, known - entry["n"])
    return NewReports(reports=reports, times=times, stalled_s=stalled_s, start=start, behind=behind)


def _times(entry: Mapping[str, Any]) -> Sequence[float]:
    """Return when the reports in one line were made: as many as it counts, so it can't make more
    reports than it has bytes for."""
    times = decoded(fitting(str, entry["times"], file="times"), "d")
    fitting(list[Seconds], times.tolist(), file="times")
    if len(times) != entry["count"] or not len(times):
        raise ValueError(f"{len(times)} times for {entry['count']} reports")
    return times


def _take_reports(run_history: RunHistory, entry: Mapping[str, Any], known: int) -> int:
    """Take one report, or many; return how many reports of their driver are known by now."""
    new = new_reports(entry, known)
    if new is None:
        return known
    run_history.history.extend(new.reports, start=new.start)
    if entry["event"] == "Reported":
        run_history.ledger.take(entry)
    else:
        run_history.ledger.take_reports(
            new.times, new.reports.steps(), new.stalled_s, start=new.start
        )
    return new.behind


def _take_rank_reports(run_history: RunHistory, entry: Mapping[str, Any], known: int) -> int:
    """Take one report of a rank above 0, or many, as `_take_reports` does."""
    is_one = entry["event"] == "RankReported"
    behind = int(entry["n"] + (1 if is_one else entry["count"]))
    if behind <= known:
        return known
    kept = run_history.of_other_ranks.setdefault(entry["rank"], Reports())
    if is_one:
        kept.add(entry["step"], entry["metrics"])
        return behind
    try:
        _times(entry)
        kept.extend(Reports.from_json(entry), start=max(0, known - entry["n"]))
    except (KeyError, ValueError) as error:
        logger.warning("%d reports in the journal are damaged: %s", behind - known, error)
        return known
    return behind


def entries(journal: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield a journal's entries. Incomplete lines of a driver that died are skipped.

    Raises:
        RunFormatError: it has a format that this version can't read.
        DamagedFileError: it holds what no driver writes.
    """
    for number, line in enumerate(_lines(journal), 1):
        try:
            entry = strict_json.loads_to_show(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "Opened" and "claim" in entry:
            raise RunFormatError(1, FORMAT)
        if isinstance(entry, dict) and {"time", "token", "event"} <= entry.keys():
            yield checked(entry, file=JOURNAL, number=number)


def _lines(journal: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    for piece in journal:
        first, *others = piece.split(b"\n")
        begun.append(first)
        for line in others:
            yield b"".join(begun)
            begun = [line]
    yield b"".join(begun)
