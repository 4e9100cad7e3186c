"""Kills of inline runs, whose one process does everything: at any line, one run after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import get_args

from tests.crash.cases import Case, Ending, Verdict, judged
from tests.crash.damage import Damage, damage_newest
from tests.crash.drivers import drive
from tests.crash.points import chosen_points
from tests.crash.scenarios import RUN, Scenario
from tests.crash.tracing import Plan, Point, recorded_lines

IN_DIRECTORY = (
    Scenario(name="newest kept"),
    Scenario(name="best kept", scored=True),
    Scenario(name="restarted", stumbles=True),
)
BUCKET = "crash"
IN_BUCKET = Scenario(name="object storage", bucket=BUCKET)

_TORN_LINE = '{"time": 1.5, "claim": 1, "ev'


@dataclass(slots=True, kw_only=True)
class Inline:
    """Finds the points of inline runs, and makes cases of them."""

    directory: Path
    """For everything that the cases write."""

    random: Random
    visits: int
    """Of each line, at most."""

    expected: dict[str, Ending] = field(default_factory=dict)
    """Scenario → how it ends undisturbed."""

    wrong: list[Verdict] = field(default_factory=list)
    """Runs that nobody has killed, which went wrong all the same."""

    _fresh: dict[str, list[Point]] = field(default_factory=dict)

    def cases(self, scenario: Scenario) -> list[Case]:
        """A fresh run is killed, at every line."""
        self._fresh[scenario.name] = self._points(Case(scenario=scenario))
        return [Case(scenario=scenario, points=(point,)) for point in self._fresh[scenario.name]]

    def cases_with_damage(self, scenario: Scenario, wanted: int) -> list[Case]:
        """The newest checkpoint is damaged after the kill."""
        kinds: Sequence[Damage] = get_args(Damage)
        return [
            Case(scenario=scenario, points=(point,), damage=kinds[index % len(kinds)])
            for index, point in enumerate(self._some_fresh(scenario, wanted))
        ]

    def cases_of_resumed_runs(self, scenario: Scenario) -> list[Case]:
        """A run that goes on after a death, with all that it may find, is killed at every line."""
        template = self._left_behind(scenario)
        points = self._points(Case(scenario=scenario, template=template))
        return [Case(scenario=scenario, points=(p,), template=template) for p in points]

    def cases_with_two_deaths(self, scenario: Scenario, wanted: int) -> list[Case]:
        """The driver that goes on dies as well, wherever that leads."""
        pairs = zip(
            self._some_fresh(scenario, wanted), self._some_fresh(scenario, wanted), strict=True
        )
        return [Case(scenario=scenario, points=pair) for pair in pairs]

    def _some_fresh(self, scenario: Scenario, wanted: int) -> list[Point]:
        points = self._fresh[scenario.name]
        return self.random.sample(points, min(wanted, len(points)))

    def _points(self, undisturbed: Case) -> list[Point]:
        """Let a run end by itself, and list its points."""
        name = undisturbed.scenario.name
        kind = f"{name} {'resumed' if undisturbed.template else 'fresh'}"
        record = self.directory / f"{kind}.lines"
        for directory, recorded in ((f"{kind} 1", None), (f"{kind} 2", record)):
            verdict = judged(
                undisturbed,
                self.directory / directory,
                expected=self.expected.get(name),
                record=recorded,
            )
            if verdict.ending is None or verdict.wrong:
                self.wrong.append(verdict)
                return []
            self.expected.setdefault(name, verdict.ending)
        return chosen_points(recorded_lines(record), visits=self.visits, random=self.random)

    def _left_behind(self, scenario: Scenario) -> Path:
        """What a driver leaves that dies before a commit, with more amiss."""
        directory = self.directory / f"{scenario.name} template"
        directory.mkdir()
        manifest_write = [p for p in self._fresh[scenario.name] if _is_in_commit(p)][-1]
        point = replace(manifest_write, visit=4)
        ended = drive(scenario, directory, plan=Plan(point=point, fired=str(directory / "fired")))
        assert ended.how == "killed", ended
        damage_newest(scenario, directory, "a manifest cut off")
        with (directory / "runs" / RUN / "journal.jsonl").open("a") as journal:
            journal.write(_TORN_LINE)
        (directory / "fired").unlink()
        return directory


def _is_in_commit(point: Point) -> bool:
    return point.line.function == "CheckpointStore.commit" and not point.tears
