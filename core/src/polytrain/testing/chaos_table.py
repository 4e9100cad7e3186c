"""The results of a chaos run, as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from polytrain.testing.chaos_runner import CaseResult

_COLUMNS = ("tried", "survived", "median s", "worst s", "wrong")
_BY_CHANCE = "by chance"


@dataclass(slots=True)
class _Row:
    tried: int = 0
    """Number of faults that have struck."""

    survived: int = 0
    """Number of these after which the run ended as it should."""

    wrong: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def add(self, outcome: CaseResult) -> None:
        self.tried += outcome.struck
        self.wrong += bool(outcome.wrong)
        if not outcome.wrong:
            self.survived += outcome.struck
        self.recoveries_s += outcome.recoveries_s
        self.notes |= {outcome.note} - {""}

    @property
    def figures(self) -> str:
        known = self.recoveries_s
        times = (f"{median(known):.2f}", f"{max(known):.2f}") if known else ("", "")
        columns = (self.tried, self.survived, *times, self.wrong)
        return "".join(f"{figure!s:>10}" for figure in columns)


def print_table(results: Iterable[CaseResult]) -> None:
    """Print the results of each case with each backend, and of each backend in total.

    "tried" is the number of faults that have struck, "survived" the number of these in runs that
    ended as they should, "median" and "worst" are the seconds from a fault to the next report,
    "wrong" is the number of runs with any problem.
    """
    results = [outcome for outcome in results if outcome.run.case.faults]
    cases: defaultdict[tuple[str, str], _Row] = defaultdict(_Row)
    backends: defaultdict[str, _Row] = defaultdict(_Row)
    for outcome in results:
        case = outcome.run.case.name
        name = _BY_CHANCE if case.startswith("seed ") else case
        cases[outcome.run.subject.name, name].add(outcome)
        backends[outcome.run.subject.name].add(outcome)
    width = max((len(name) for _, name in cases), default=0) + 2
    head = "".join(f"{column:>10}" for column in _COLUMNS)
    for backend, row in backends.items():
        print(f"\n{backend:<{width}}{head}")
        for (of, name), figures in cases.items():
            if of == backend:
                notes = "; ".join(sorted(figures.notes))
                print(f"{name:<{width}}{figures.figures}  {notes}".rstrip())
        print(f"{'in all':<{width}}{row.figures}")
