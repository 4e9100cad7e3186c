"""The figures of a crash test, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.crash.cases import Verdict

_COLUMNS = ("points", "killed", "carried on", "wrong")


@dataclass(slots=True)
class _Row:
    points: int = 0
    killed: int = 0
    carried_on: int = 0
    wrong: int = 0

    def add(self, verdict: Verdict) -> None:
        self.points += len(verdict.case.points)
        self.killed += verdict.killed
        if verdict.ending is not None:
            self.carried_on += verdict.killed
        self.wrong += bool(verdict.wrong)

    @property
    def figures(self) -> tuple[int, ...]:
        return self.points, self.killed, self.carried_on, self.wrong


def print_tables(verdicts: Iterable[Verdict]) -> None:
    """Print what came of cases: by who was killed, by file, and in all.

    "points" is where processes were to die, "killed" how many did, "carried on" how many of those
    in runs that have come to their end, "wrong" cases of which anything isn't as it must be.
    """
    known = [verdict for verdict in verdicts if verdict.case.points]
    _print_table("killed in which kind of run", known, _kind)
    _print_table("at a line of", known, lambda verdict: verdict.case.points[0].line.file)
    _print_table("", known, lambda verdict: "in all")


def _kind(verdict: Verdict) -> str:
    case = verdict.case
    if case.scenario.workers:
        return f"{case.points[0].line.role}, {case.scenario.name}"
    if case.template is not None:
        what = ", resumed"
    elif case.damage is not None:
        what = ", a checkpoint damaged"
    else:
        what = ", twice" if len(case.points) > 1 else ""
    return f"inline, {case.scenario.name}{what}"


def _print_table(title: str, verdicts: list[Verdict], key: Callable[[Verdict], str]) -> None:
    rows: defaultdict[str, _Row] = defaultdict(_Row)
    for verdict in verdicts:
        rows[key(verdict)].add(verdict)
    width = max(map(len, (title, *rows)))
    print(f"\n{title:<{width}}" + "".join(f"{column:>12}" for column in _COLUMNS))
    for name in sorted(rows):
        print(f"{name:<{width}}" + "".join(f"{figure:>12}" for figure in rows[name].figures))
