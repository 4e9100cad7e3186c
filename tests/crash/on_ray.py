"""Kills of runs with workers: of the driver, of agents, of trainers, one run after another."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import ray
from tests.crash.cases import AvailableClusters, Case, Ending, Verdict, judged
from tests.crash.points import chosen_points, spread
from tests.crash.scenarios import Scenario
from tests.crash.services import cluster
from tests.crash.tracing import PLAN, Plan, Point, recorded_lines

from polytrain.testing.processes import eventually, title

SCENARIOS = (
    Scenario(name="rank 0 writes", workers=2),
    Scenario(name="every rank writes", workers=2, written_by="every_rank"),
    Scenario(name="one worker", workers=1),
    Scenario(name="every rank to a bucket", workers=2, written_by="every_rank", bucket="crash"),
)

_STARTUP = Path(__file__).parent / "startup"
_ROOT = Path(__file__).parents[2]


@dataclass(slots=True, kw_only=True)
class OnRay:
    """Finds the points of runs with workers, makes cases of them, and carries them out."""

    directory: Path
    """For everything that the cases write."""

    random: Random
    around: AvailableClusters
    wrong: list[Verdict] = field(default_factory=list)
    """Runs that nobody has killed, which went wrong all the same."""

    _expected: dict[str, Ending] = field(default_factory=dict)

    def verdicts(self, scenarios: tuple[Scenario, ...], wanted: int) -> Iterator[Verdict]:
        """Carry out as many cases, over all scenarios, kinds of processes and files."""
        groups: defaultdict[tuple[str, str], list[Case]] = defaultdict(list)
        for scenario in scenarios:
            for point in self._points(scenario):
                kind = point.line.role.split()[0]
                groups[scenario.name, kind].append(Case(scenario=scenario, points=(point,)))
        spread_in_groups = [
            (case, name)
            for name, cases in groups.items()
            for case in spread(cases, wanted, lambda c: c.points[0].line.file, random=self.random)
        ]
        chosen = spread(spread_in_groups, wanted, lambda item: item[1], random=self.random)
        yield from self.wrong
        for number, (case, _) in enumerate(chosen):
            yield judged(
                case,
                self.directory / f"ray-{number:03d}",
                expected=self._expected[case.scenario.name],
                around=self.around,
            )

    def _points(self, scenario: Scenario) -> list[Point]:
        record = self.directory / f"{scenario.name}.lines"
        verdict = judged(
            Case(scenario=scenario),
            self.directory / scenario.name.replace(" ", "-"),
            expected=None,
            around=self.around,
            record=record,
        )
        if verdict.ending is None or verdict.wrong:
            self.wrong.append(verdict)
            return []
        self._expected[scenario.name] = verdict.ending
        points = chosen_points(recorded_lines(record), visits=1, random=self.random)
        # Agents that have no rank yet can't be told apart.
        known = [p for p in points if p.line.role == "driver" or p.line.role[-1].isdigit()]
        return [p for p in known if not p.tears]


@contextmanager
def ray_around(directory: Path) -> Iterator[AvailableClusters]:
    """A cluster whose processes look for a plan when they start.

    Args:
        directory: of the cases, whose files trainers are to be able to link.
    """
    plan, temporary = directory / "plan", directory / "tmp"
    temporary.mkdir()
    path = (str(_STARTUP), str(_ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        PLAN: str(plan),
        "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(temporary),
        # A socket's path mustn't be long.
        "RAY_TMPDIR": "/tmp",
        # Drivers have imported Ray before they know of the cluster, and have no token for it.
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }

    def tell(expected: Plan) -> None:
        unfinished = plan.with_suffix(".unfinished")
        unfinished.write_text(expected.to_json())
        unfinished.replace(plan)

    with cluster(environment) as address:

        def connect() -> None:
            os.environ.update(environment)
            ray.init(address=address, log_to_driver=False, logging_level=40)

        yield AvailableClusters(connect=connect, tell=tell, orphans=lambda: _orphans(str(plan)))


def _orphans(plan: str) -> list[str]:
    def left() -> list[str]:
        below = psutil.Process().children(recursive=True)
        # Ray writes its titles over the environment: agents are known by whose they are.
        agents = [process for process in below if "ray::RayHost" in title(process)]
        others = [process for process in psutil.process_iter() if _is_worker(process, plan)]
        return [f"{title(process)} ({process.pid})" for process in agents + others]

    eventually(lambda: not left())
    return left()


def _is_worker(process: psutil.Process, plan: str) -> bool:
    try:
        return "polytrain.workers" in title(process) and process.environ().get(PLAN) == plan
    except psutil.Error:
        return False
