"""Decides whether a report shows that training diverges, and what is left out afterwards. Pure.

Each rank looks at its own reports for values that are NaN or infinite: a bad batch may be bad on
one rank alone. Rank 0 applies what compares a report with those before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median
from types import MappingProxyType
from typing import Any

from polytrain.config.configs import FailureConfig
from polytrain.events.notices import Rollback, Skipped
from polytrain.policy.stop_rule import answers_true, known_as
from polytrain.text.metrics import copied, named_metric

WINDOW = 100
"""Reports with which a new one is compared."""

_LEAST_VALUES = 10
"""Values from which on a metric can have a spike."""

Place = tuple[int, int]
"""An epoch, and the number of its rows that have been given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """A rank's place in one data set."""

    place: Place
    rows: int
    """Number of positions of an epoch."""

    skips: bool
    """Whether its batches can be left out by their positions."""

    since: Place = (0, 0)
    """Where reading for the report began at the earliest: see `Cursor.looked_past`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceRule:
    """What counts as divergence."""

    names: tuple[str, ...] | None = ()
    """Metrics that mustn't be NaN or infinite; None for all of them."""

    spikes: Mapping[str, float] = field(default_factory=dict)
    """Metric → how many times the median of its last values is too much."""

    function: Callable[[list[Mapping[str, Any]]], bool] | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """The metrics that the rule names."""
        return (*(self.names or ()), *self.spikes)

    @property
    def reads_history(self) -> bool:
        """Whether a report is compared with those before it."""
        return bool(self.spikes) or self.function is not None

    def wrong(
        self, metrics: Mapping[str, Any], before: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        """Return what is wrong with a report; None if it is good.

        Args:
            before: the last good reports, oldest first; None on ranks that don't compare.

        Raises:
            Exception: the function fails, see `answers_true`.
        """
        for name, value in self._watched(metrics):
            if not math.isfinite(value):
                return f"{name} is {value}"
        if before is None:
            return None
        for name, times in self.spikes.items():
            values = _numbers(before, name)
            usual = median(values) if len(values) >= _LEAST_VALUES else math.inf
            for value in _numbers([metrics], name):
                if value > times * usual > 0:
                    return (
                        f"{name} is {value:g}, more than {times:g} times {usual:g}, the median of "
                        f"its last {len(values)} values"
                    )
        function = self.function
        if function is not None:
            option = "FailureConfig.divergence"
            reports = [copied(each) for each in (*before, metrics)]
            if answers_true(function, reports, option=option, given=metrics):
                return f"{known_as(function)} returned True"
        return None

    def _watched(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        if self.names is None:
            yield from _all_numbers(metrics)
            return
        for name in self.named:
            yield from ((name, value) for value in _numbers([metrics], name))


def divergence_rule(config: FailureConfig) -> DivergenceRule | None:
    """Return the rule of a configuration that is known to be right; None without one."""
    given: Any = config.divergence
    if config.on_divergence is None:
        return None
    if given is None:
        return DivergenceRule(names=None)
    if isinstance(given, str):
        return DivergenceRule(names=(given,))
    if isinstance(given, Mapping):
        return DivergenceRule(spikes=dict(given))
    if callable(given):
        return DivergenceRule(function=given)
    return DivergenceRule(names=tuple(given))


@dataclass(slots=True)
class Divergences:
    """The divergences of a run, over all its drivers: a part of the fold of its journal."""

    _found: dict[tuple[int, int], tuple[Rollback, str | None]] = field(default_factory=dict)
    """Token and attempt → the divergence that counts, and the directory of the attempt's starting
    checkpoint if no report since then was good."""

    _discards: set[tuple[int, int]] = field(default_factory=set)
    """Those after which the run only discards a survivor's state."""

    _start: tuple[int, str | None] = (0, None)
    """Step and directory of the last attempt's starting checkpoint."""

    def launched(self, step: int, start: str | None) -> None:
        """Note that an attempt starts at a checkpoint's address, or without one."""
        # A run may be resumed by another address, for example after it was moved.
        self._start = step, start and start.rstrip("/").rpartition("/")[2]

    def take(self, token: int, found: Rollback, *, is_rollback: bool = True) -> None:
        """Take the divergence that a rank has found; of several the earliest counts.

        Args:
            is_rollback: False if the run only discards a survivor's state after it.
        """
        key = token, found.attempt
        if key in self._found and self._found[key][0].good_step <= found.good_step:
            return
        step, start = self._start
        self._found[key] = found, start if found.good_step <= step else None
        if is_rollback:
            self._discards.discard(key)
        else:
            self._discards.add(key)

    @property
    def rollbacks(self) -> tuple[Rollback, ...]:
        """The rollbacks, oldest first."""
        found = [each for key, (each, _) in self._found.items() if key not in self._discards]
        return tuple(replace(rollback, number=number) for number, rollback in enumerate(found, 1))

    @property
    def skipped(self) -> Mapping[str, tuple[Skipped, ...]]:
        """Data set → all that the run leaves out of it."""
        found: dict[str, tuple[Skipped, ...]] = {}
        for rollback, _ in self._found.values():
            for name, ranges in rollback.skipped.items():
                found[name] = (*found.get(name, ()), *ranges)
        return found

    def is_bad(
        self, attempt_id: tuple[int, int], step: int, directory: str, *, is_rescue: bool = False
    ) -> bool:
        """Return whether a checkpoint may hold what has diverged.

        It does if its attempt diverged, and had no good report after the checkpoint's. It is the
        cause, too, if two attempts diverged with their first report after it by the same batches,
        or three by whatever batches: two that are bad may follow each other. One is enough if that
        is the state of a survivor, which no report has shown to be good.

        Args:
            attempt_id: token and number of its attempt.
        """
        if not self._found:
            return False
        of_attempt = self._found.get(attempt_id)
        if of_attempt is not None and step > of_attempt[0].good_step:
            return True
        blamed = [found.skipped for found, start in self._found.values() if start == directory]
        if is_rescue:
            return bool(blamed)
        return len(blamed) > 2 or any(one == other for one, other in combinations(blamed, 2))


class DivergenceWatch:
    """One rank's reports of one attempt: the last good ones, and where the data was then."""

    def __init__(
        self,
        rule: DivergenceRule,
        *,
        rank: int,
        step: int,
        places: Mapping[str, DataPlace],
        before: Iterable[Mapping[str, Any]],
        skips: bool,
        starts_unseen: bool = False,
        skipped: Mapping[str, Sequence[Skipped]] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            step: the step of the checkpoint that the attempt starts from.
            places: the rank's place in each data set at the start.
            before: the last reports before that step, oldest first.
            skips: whether batches are left out after a bad report.
            starts_unseen: whether the attempt starts from a survivor's state, which no report has
                shown to be good. If its first report is bad, the batch that has led to it may be
                one before, so none is left out: the next attempt finds it again.
            skipped: data set → what the attempt leaves out of it.
        """
        self._rule = rule
        self._rank = rank
        self._skips = skips
        self._skipped = skipped
        self._is_first = True
        self._is_unseen = starts_unseen
        self.keeps_all = ""
        """Why no batch can be left out, whatever was read; empty if nothing is known."""

        self.notice = ""
        """Why no batch could have been left out, had the first report been bad; empty if some
        could."""

        self._before = deque(before, maxlen=WINDOW)
        self._good: tuple[int, dict[str, DataPlace]] = step, {**places}

    def opened(self, name: str, place: DataPlace) -> None:
        """Take the place at which data that the training function brings itself begins."""
        self._good[1].setdefault(name, place)

    def look(
        self,
        *,
        attempt: int,
        step: int,
        metrics: Mapping[str, Any],
        places: Mapping[str, DataPlace],
    ) -> tuple[Rollback, str] | None:
        """Take the next report.

        Returns:
            None if it is good; else what to go back over, and why that isn't possible, if it isn't.

        Raises:
            Exception: any error of the user's function.
        """
        compares = self._rank == 0 and self._rule.reads_history
        wrong = self._rule.wrong(metrics, [*self._before] if compares else None)
        if self._is_first:
            self._is_first = False
            self.notice = self._left_out(places)[1]
        if wrong is None:
            self._good, self._is_unseen = (step, {**places}), False
            if compares:
                self._before.append(metrics)
            return None
        good_step = self._good[0]
        skipped, problem = self._left_out(places)
        found = Rollback(
            attempt=attempt,
            rank=self._rank,
            step=step,
            good_step=good_step,
            reason=wrong,
            skipped=skipped,
        )
        return found, problem

    def _left_out(
        self, places: Mapping[str, DataPlace]
    ) -> tuple[Mapping[str, tuple[Skipped, ...]], str]:
        if not self._skips or self._is_unseen:
            return {}, ""
        if self.keeps_all:
            return {}, f"{self.keeps_all}. {_INSTEAD}"
        return left_out(self._good[1], places, self._skipped)


_INSTEAD = "FailureConfig(on_rollback=…) changes the configuration instead of leaving batches out"


def left_out(
    good: Mapping[str, DataPlace],
    bad: Mapping[str, DataPlace],
    skipped: Mapping[str, Sequence[Skipped]] = MappingProxyType({}),
) -> tuple[Mapping[str, tuple[Skipped, ...]], str]:
    """Return what was read between two reports, and why it can't be left out; empty if it can.

    Args:
        good: each data set's place at the last good report.
        bad: the same at the bad one; a data set that is new there began at its beginning.
        skipped: data set → what was left out there, and so wasn't read.
    """
    moved = {
        name: (start, now)
        for name, now in bad.items()
        for start in [_start(good[name].place if name in good else (0, 0), now)]
        # Where only an epoch has ended, no row was read.
        if any(_between(start, now))
    }
    if "train" in moved:
        # The others are read to validate.
        moved = {"train": moved["train"]}
    whole = {
        name for name, (start, now) in moved.items() if _is_epoch(start, now, skipped.get(name, ()))
    }
    parts = {name: each for name, each in moved.items() if name not in whole}
    if not moved:
        return {}, (
            "no data set that polytrain reads was read between the last good report and this one, "
            f"so no batch can be left out. {_INSTEAD}"
        )
    if not parts:
        return {}, (
            f"all of an epoch of {_names(whole)} was read between the last good report and this "
            f"one. Report every few steps, so that few batches are left out; {_INSTEAD}"
        )
    fixed = [name for name, (_, now) in parts.items() if not now.skips]
    if fixed:
        return {}, f"batches of {_names(fixed)} can't be left out by their positions. {_INSTEAD}"
    return {name: tuple(_between(start, now)) for name, (start, now) in parts.items()}, ""


def _start(good: Place, now: DataPlace) -> Place:
    """Where what was read since a good report begins, but for looks at the first batches."""
    return max(good, now.since) if now.since < now.place else good


def _is_epoch(start: Place, now: DataPlace, skipped: Iterable[Skipped]) -> bool:
    """Whether at least as many rows as an epoch has were read between two places."""
    (epoch, first), (last, stop) = start, now.place
    begun, end = epoch * now.rows + first, last * now.rows + stop
    read = end - begun
    for number, hole, after in sorted(skipped):
        at = max(begun, number * now.rows + hole)
        # What is left out may overlap.
        begun = max(begun, min(end, number * now.rows + min(after, now.rows)))
        read -= max(0, begun - at)
    return read >= now.rows


def _between(start: Place, now: DataPlace) -> Iterator[Skipped]:
    (epoch, first), (last, stop) = start, now.place
    for number in range(epoch, last + 1):
        end = stop if number == last else now.rows
        if first < end:
            yield number, first, end
        first = 0


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _numbers(reports: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The values of a metric in the reports that have it as a number."""
    found = []
    for metrics in reports:
        try:
            value = named_metric(metrics, name)
        except KeyError:
            continue
        if isinstance(value, int | float):
            found.append(float(value))
    return found


def _all_numbers(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _all_numbers(value, f"{prefix}/{name}" if prefix else name)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _all_numbers(value, prefix)
    elif isinstance(values, float):
        yield prefix, values
