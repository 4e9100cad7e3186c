"""Compares a stretch of a run with its repetition, report by report. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from polytrain.record.attempts import AttemptOverview, counting_attempts
from polytrain.record.entries import (
    DIGEST_LENGTH,
    DigestsKept,
    Entry,
    Launched,
    MetricsReported,
    Opened,
    RunConcluded,
    ValidationEnded,
)
from polytrain.record.history import RunHistory
from polytrain.record.reports import Reports
from polytrain.text.described import numbered


@dataclass(slots=True)
class ReportedHistory(RunHistory):
    """A history whose reports are as workers made them, with the digests of rank 0's state."""

    digests: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Step → tensor → digest, where they were kept and no restart has undone them."""

    by_survivors: dict[int, int] = field(default_factory=dict)
    """Step → the rank that has made its report, because rank 0 was lost before."""

    identities: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Fencing token of each driver's lease → what it trained the run with."""

    _tensors: Sequence[str] = ()

    def take(self, entry: Entry) -> None:
        """Take the next entry of the journal; see `RunHistory.take`."""
        RunHistory.take(self, entry)
        if entry.token < self._token:
            return
        match entry:
            case Opened(token=token, identity=identity):
                self.identities[token] = identity
            case RunConcluded(token=token):
                self.identities[token] = self.identity
            case Launched(step=step):
                for kept in (self.digests, self.by_survivors):
                    for later in [each for each in kept if each > step]:
                        del kept[later]
            case MetricsReported(rank=0, step=step, survivor=int(survivor)):
                self.by_survivors[step] = survivor
            case DigestsKept(step=step, names=names, digests=digests):
                self._tensors = names or self._tensors
                parts = (digests[at : at + DIGEST_LENGTH] for at in _starts(digests))
                self.digests[step] = dict(zip(self._tensors, parts, strict=False))

    def _take_validation(self, entry: ValidationEnded) -> None:
        # What a validation adds is no part of a report.
        pass


def _starts(digests: str) -> range:
    return range(0, len(digests), DIGEST_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDifference:
    """The first place at which a repetition differs from the run."""

    step: int
    kind: Literal["report", "metric", "tensor"]
    name: str = ""
    """The name of the metric or tensor; empty if a whole report is missing."""

    was: Any = None
    """The run's value, or the tensor's digest; None if it has none."""

    now: Any = None
    """The repetition's value; None if it has none."""

    def __str__(self) -> str:
        if self.kind == "report":
            has, lacks = ("replay", "run") if self.was is None else ("run", "replay")
            return f"step {self.step}: the {has} has a report, the {lacks} has none"
        return f"step {self.step}: {self.kind} {self.name!r} was {self.was!r}, now {self.now!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What is repeated: the reports after one step, up to another."""

    start: int
    end: int
    num_workers: int
    """Workers with which the run has made these reports."""

    shortened: str = ""
    """Why it ends before the step that was asked for; empty if it doesn't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What `Result.replay` has found."""

    from_step: int
    """Step of the checkpoint from which the replay started; 0 for the start of the run."""

    to_step: int
    """The last step that was compared."""

    reports: int
    """Number of reports that were compared."""

    digests: int = 0
    """Number of reports at which digests of all tensors were compared."""

    differences: tuple[ReportDifference, ...] = ()
    """The first report or metric that differs, and the first tensor, in the order of steps; empty
    if nothing differs."""

    not_compared: tuple[str, ...] = ()
    """Sentences on what the replay couldn't compare."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        found = [str(each) for each in self.differences] or [
            f"{numbered(self.reports, 'report', 'are')} equal, "
            f"from step {self.from_step + 1} to {self.to_step}"
            + (f", and {numbered(self.digests, 'digest')} of the state" if self.digests else "")
        ]
        return ". ".join((*found, *(each.rstrip(".") for each in self.not_compared))) + "."


def starting_steps(steps: Collection[int], from_step: int | None, last_step: int) -> list[int]:
    """Return the steps of checkpoints from which a replay may start, the best first.

    Args:
        steps: those of all checkpoints, and 0.
        from_step: the step that was asked for; None for the last from which there are reports.
    """
    most = last_step - 1 if from_step is None else from_step
    return sorted((each for each in steps if each <= most), reverse=True)


def attempts_since(attempts: Iterable[AttemptOverview], start: int) -> list[AttemptOverview]:
    """Return the attempts that have made the reports after a step."""
    made = counting_attempts(attempts)
    at = max((i for i, each in enumerate(made) if each.first_step <= start), default=0)
    return made[at:]


def stretch_of(
    attempts: Iterable[AttemptOverview],
    *,
    start: int,
    end: int,
    last_step: int,
    changes: Mapping[int, str] = MappingProxyType({}),
) -> Stretch:
    """Return the stretch after `start`: trained with the same, by the same number of workers.

    With virtual workers, any number of workers makes the same reports.

    Args:
        changes: driver → what it trained the run with that the repetition doesn't have, as names;
            without drivers where nothing differs.
    """
    first, *later = attempts_since(attempts, start)
    workers, virtual = first.num_workers, first.virtual_workers
    stretch = Stretch(start=start, end=end, num_workers=workers)
    others = [
        each
        for each in later
        if each.driver in changes
        or each.virtual_workers != virtual
        or (each.num_workers != workers and virtual is None)
    ]
    change = next(iter(others), None)
    if change is not None and change.first_step < min(end, last_step):
        if change.driver in changes:
            what = f"was trained with other values of {changes[change.driver]}"
        elif change.virtual_workers != virtual:
            what = f"had virtual_workers={change.virtual_workers}, before {virtual}"
        else:
            what = f"had {numbered(change.num_workers, 'worker')}, before {workers}"
        why = f"from step {change.first_step + 1} on the run {what}"
        return replace(stretch, end=change.first_step, shortened=why)
    if last_step < end:
        return replace(stretch, end=last_step, shortened=f"the run's last report is {last_step}")
    return stretch


def compare(
    was: Reports,
    now: Reports,
    stretch: Stretch,
    *,
    ignore: Collection[str],
    by_survivors: Collection[int] = (),
) -> tuple[int, ReportDifference | None]:
    """Return how many reports are compared, and the first difference.

    Args:
        by_survivors: steps whose metrics aren't compared, because one of the two has another
            rank's than rank 0's.
    """
    is_inside: Callable[[int], bool] = range(stretch.start + 1, stretch.end + 1).__contains__
    before, again = (
        {step: metrics for step, metrics in each.since(0) if is_inside(step)} for each in (was, now)
    )
    count = 0
    for step in sorted(before.keys() | again.keys()):
        if step not in before or step not in again:
            first, second = before.get(step), again.get(step)
            return count, ReportDifference(step=step, kind="report", was=first, now=second)
        if step in by_survivors:
            continue
        count += 1
        name = _differing(before[step], again[step], ignore)
        if name is not None:
            values = {"was": before[step].get(name), "now": again[step].get(name)}
            return count, ReportDifference(step=step, kind="metric", name=name, **values)
    return count, None


def compare_digests(
    was: Mapping[int, Mapping[str, str]], now: Mapping[int, Mapping[str, str]], stretch: Stretch
) -> tuple[int, ReportDifference | None]:
    """Return at how many steps digests are compared, and the first tensor that differs.

    Args:
        was: step → tensor → digest, of the run.
    """
    both = [each for each in was if each in now and stretch.start < each <= stretch.end]
    for count, step in enumerate(sorted(both), start=1):
        for name in {**was[step], **now[step]}:
            before, again = was[step].get(name), now[step].get(name)
            if before != again:
                return count, ReportDifference(
                    step=step, kind="tensor", name=name, was=before, now=again
                )
    return len(both), None


def _differing(
    was: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str]
) -> str | None:
    for name in {**was, **now}:
        if name in ignore:
            continue
        if name not in was or name not in now or not _is_same(was[name], now[name]):
            return name
    return None


def _is_same(was: Any, now: Any) -> bool:
    """Whether two values are the same to the bit: 0.0 isn't -0.0, and NaN is NaN."""
    if type(was) is float and type(now) is float:
        both_nan = math.isnan(was) and math.isnan(now)
        return both_nan or (was == now and math.copysign(1, was) == math.copysign(1, now))
    return json.dumps(was, sort_keys=True) == json.dumps(now, sort_keys=True)
