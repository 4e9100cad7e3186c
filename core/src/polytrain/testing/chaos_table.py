"""What has come of a chaos run, as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from polytrain.testing.chaos_runner import Verdict

_COLUMNS = ("tried", "survived", "median s", "worst s", "wrong")
_BY_CHANCE = "by chance"


@dataclass(slots=True)
class _Row:
    tried: int = 0
    """Faults that have struck."""

    survived: int = 0
    """Those after which the run ended as it should."""

    wrong: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)

    def add(self, verdict: Verdict) -> None:
        self.tried += verdict.struck
        self.wrong += bool(verdict.wrong)
        if not verdict.wrong:
            self.survived += verdict.struck
        self.recoveries_s += verdict.recoveries_s
        self.notes |= {verdict.note} - {""}

    @property
    def figures(self) -> str:
        known = self.recoveries_s
        times = (f"{median(known):.2f}", f"{max(known):.2f}") if known else ("", "")
        columns = (self.tried, self.survived, *times, self.wrong)
        return "".join(f"{figure!s:>10}" for figure in columns)


def print_table(verdicts: Iterable[Verdict]) -> None:
    """Print what came of each case with each backend, and of each backend in all.

    "tried" is how many faults have struck, "survived" how many of those in runs that ended as they
    must, "median" and "worst" are the seconds from a fault to the first report after it, "wrong"
    counts runs of which anything isn't as it must be.
    """
    verdicts = [verdict for verdict in verdicts if verdict.run.case.faults]
    cases: defaultdict[tuple[str, str], _Row] = defaultdict(_Row)
    backends: defaultdict[str, _Row] = defaultdict(_Row)
    for verdict in verdicts:
        case = verdict.run.case.name
        name = _BY_CHANCE if case.startswith("seed ") else case
        cases[verdict.run.subject.name, name].add(verdict)
        backends[verdict.run.subject.name].add(verdict)
    width = max((len(name) for _, name in cases), default=0) + 2
    head = "".join(f"{column:>10}" for column in _COLUMNS)
    for backend, row in backends.items():
        print(f"\n{backend:<{width}}{head}")
        for (of, name), figures in cases.items():
            if of == backend:
                notes = "; ".join(sorted(figures.notes))
                print(f"{name:<{width}}{figures.figures}  {notes}".rstrip())
        print(f"{'in all':<{width}}{row.figures}")
