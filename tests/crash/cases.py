"""One case: a run is killed, what it has left is looked at, it is resumed, and judged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.damage import Damage, damage_newest
from tests.crash.drivers import TEMPORARY, Ended, drive
from tests.crash.evidence import Committed, Evidence
from tests.crash.retention import survivors
from tests.crash.scenarios import Diary, Scenario
from tests.crash.tracing import Plan, Point

_MOST_DRIVERS = 4

_NOT_PLACED = ("workers can't be placed", "an agent was lost while workers were placed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is done to one run."""

    scenario: Scenario
    points: tuple[Point, ...] = ()
    """Where it is killed: the first driver's run at the first, the next one's at the next."""

    template: Path | None = None
    """A case's directory with a run that the first driver goes on with."""

    damage: Damage | None = None
    """What happens to the newest checkpoint after the last kill."""

    def __str__(self) -> str:
        messages = [str(point) for point in self.points] + ([self.damage] if self.damage else [])
        return f"{self.scenario.name}: {', then '.join(messages)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end state of a run, as far as it is the same whatever happens on the way."""

    history: list[Any]
    metrics: Any
    step: int
    files: Any
    """Of the newest checkpoint: name → SHA-256."""

    positions: Any
    kept: list[int]
    """Steps of the checkpoints that are kept, from best to worst."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What came of a case."""

    case: Case
    directory: Path
    killed: int = 0
    """Points at which a process has died."""

    drivers: int = 0
    """Calls of `fit()` that it took."""

    ending: Ending | None = None
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableClusters:
    """What runs with processes of their own need; inline runs need nothing."""

    connect: Callable[[], None] | None = None
    """Connects a driver to a cluster."""

    tell: Callable[[Plan], None] | None = None
    """Tells a plan to processes that aren't forked from here."""

    orphans: Callable[[], list[str]] | None = None
    """Waits until no process of a run is left; returns those that stay."""


NOTHING = AvailableClusters()


def judged(
    case: Case,
    directory: Path,
    *,
    expected: Ending | None,
    around: AvailableClusters = NOTHING,
    record: Path | None = None,
) -> Verdict:
    """Carry a case out.

    Args:
        case: which.
        directory: for it; must not be there yet.
        expected: the end of the run that nobody disturbs; None if this is that one.
        around: where it runs.
        record: file for the lines that are visited.
    """
    if case.template is None:
        directory.mkdir(parents=True)
    else:
        shutil.copytree(case.template, directory)
    return _Judge(case, directory, expected, around, record).verdict


class _Judge:
    def __init__(
        self,
        case: Case,
        directory: Path,
        expected: Ending | None,
        around: AvailableClusters,
        record: Path | None,
    ) -> None:
        self.verdict = Verdict(case=case, directory=directory)
        self._case = case
        self._directory = directory
        self._expected = expected
        self._around = around
        self._record = record
        self._diary = Diary.of(directory)
        self._seen = len(self._diary.entries("started"))
        self._look_for_losses(case.scenario.evidence(directory))
        for turn in range(_MOST_DRIVERS):
            before = case.scenario.evidence(directory)
            if self._has_ended(self._drive(turn), before, turn):
                return
        self._complain(f"it hasn't ended after {_MOST_DRIVERS} drivers")

    def _complain(self, what: str) -> None:
        self.verdict.wrong.append(what)

    def _drive(self, turn: int) -> Ended:
        point = self._case.points[turn] if turn < len(self._case.points) else None
        fired = self._directory / f"fired-{turn}"
        record = str(self._record) if self._record is not None else None
        plan = Plan(point=point, fired=str(fired), record=record)
        if self._around.tell is not None:
            self._around.tell(plan)
        self.verdict.drivers += 1
        ended = drive(
            self._case.scenario,
            self._directory,
            plan=plan if point is not None or record is not None else None,
            connect=self._around.connect,
        )
        self.verdict.killed += fired.exists()
        return ended

    def _has_ended(self, ended: Ended, before: Evidence, turn: int) -> bool:
        after = self._case.scenario.evidence(self._directory)
        self._look_at_starts(before, after, turn)
        self._look_for_losses(after)
        if self._around.orphans is not None:
            for orphan in self._around.orphans():
                self._complain(f"a process is left: {orphan}")
        if ended.how == "returned":
            self._look_at_end(after)
            if len(after.starts) > len(before.starts):
                self._look_at_scratch()
            return True
        if not self._was_to_end_so(ended, turn):
            self._complain(f"driver {turn + 1} has {ended.how}: {ended.log[-2000:]}")
            return True
        if turn == len(self._case.points) - 1 and self._case.damage is not None:
            damage_newest(self._case.scenario, self._directory, self._case.damage)
        return False

    def _was_to_end_so(self, ended: Ended, turn: int) -> bool:
        if turn >= len(self._case.points):
            return False
        if self._case.points[turn].line.role == "driver":
            return ended.how == "killed"
        # An agent that dies before there are trainers ends the run, which can be resumed.
        return ended.how == "failed" and any(reason in ended.log for reason in _NOT_PLACED)

    def _look_at_starts(self, before: Evidence, after: Evidence, turn: int) -> None:
        """Whether each attempt has resumed from the newest checkpoint that is intact."""
        newest = before.newest
        for start in after.starts[len(before.starts) :]:
            expected = (newest.directory, newest.step) if newest else (None, 0)
            if (start.checkpoint, start.step) != expected:
                self._complain(f"it went on from {start} instead of {expected}")
        entries = self._diary.entries("started")
        fresh, self._seen = entries[self._seen :], len(entries)
        for entry in fresh:
            if entry["checkpoint"] != entry["newest"]:
                self._complain(f"an attempt went on from another than the newest: {entry}")
            of_trainer = (
                turn < len(self._case.points)
                and self._case.points[turn].line.role.startswith("trainer")
                and entry["attempt"] > 0
            )
            if of_trainer and entry["step"] < entry["part_staged"]:
                self._complain(f"what trainers had handed over was lost: {entry}")

    def _look_for_losses(self, after: Evidence) -> None:
        """Whether everything that was committed, and not deleted since, is there."""
        there = {checkpoint.directory for checkpoint in after.checkpoints}
        found = {entry["directory"] for entry in self._diary.entries("committed")}
        for checkpoint in after.checkpoints:
            if checkpoint.directory not in found:
                # Its driver died before it could tell.
                score = checkpoint.metrics["score"]
                self._diary.write("committed", directory=checkpoint.directory, score=score)
        lost = survivors(self._diary, scored=self._case.scenario.scored) - there
        for directory in sorted(lost):
            self._complain(f"the checkpoint {directory} is lost")

    def _look_at_end(self, after: Evidence) -> None:
        by_name = {checkpoint.directory: checkpoint for checkpoint in after.checkpoints}
        found = self._diary.entries("ended")[-1]
        endings = []
        for source in ("result", "read"):
            entry = found[source]
            torn = [name for name in (entry["checkpoint"], *entry["best"]) if name not in by_name]
            if torn:
                self._complain(f"returned, but not intact: {torn}")
                return
            endings.append(_ending(entry, by_name))
        result, read = endings
        self.verdict.ending = result
        if result != read:
            self._complain(f"Result.from_path reads {read}, fit returned {result}")
        if self._expected is not None and result != self._expected:
            self._complain(f"the end is {result}, undisturbed it is {self._expected}")
        if set(found["result"]["best"]) != by_name.keys():
            self._complain(f"there are {sorted(by_name)}, the result has {found['result']['best']}")
        if after.litter:
            self._complain(f"left behind: {after.litter}")

    def _look_at_scratch(self) -> None:
        """Whether the node's own files of drivers that died are gone with the last one's."""
        left = list((self._directory / TEMPORARY).glob("polytrain-*/*"))
        if left:
            self._complain(f"left behind: {left}")


def _ending(message: dict[str, Any], checkpoints: dict[str, Committed]) -> Ending:
    final = checkpoints[message["checkpoint"]]
    return Ending(
        history=message["history"],
        metrics=message["metrics"],
        step=final.step,
        files=final.files,
        positions=final.positions,
        kept=[checkpoints[name].step for name in message["best"]],
    )
