"""Runs all cases of the chaos tier for the test classes of some backends, then random faults.

    python -m polytrain.testing.chaos_cli tests/conformance --minutes 30 --seed 1 --backend torch

Every case is injected into the training of every backend, and into a function that shows which
rows were used. That takes some minutes for each backend. If `--minutes` aren't over then, faults at
random follow.
A problem is printed at once, with the command that repeats it. A table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from statistics import median

import ray

from polytrain.testing.chaos import ChaosTier
from polytrain.testing.chaos_cases import CASES, UNTOUCHED, Case, at_random
from polytrain.testing.chaos_runner import CaseResult, ChaosRun, Subject, Work, judged
from polytrain.testing.processes import mark_processes

_WORKS: tuple[Work, ...] = ("model", "rows")


def main() -> int:
    """Run the requested cases; return 1 if anything is wrong."""
    arguments = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="polytrain-chaos-"))
    subjects = list(_subjects(arguments.tests, set(arguments.backend)))
    if not subjects:
        print("There is no test class that inherits the chaos tier.", file=sys.stderr)
        return 2
    began = time.monotonic()
    with LocalRay() as cluster:
        trials = _Trials(directory=directory, cluster=cluster)
        untouched = [trials.run(subject, UNTOUCHED, "model") for subject in subjects]
        results = list(untouched)
        cases = [case for case in CASES if arguments.case in case.name]
        for reference in [] if arguments.only_chance else untouched:
            subject = reference.run.subject
            for case, work in product(cases, _WORKS):
                results.append(trials.run(subject, case, work, reference))
            seconds = time.monotonic() - began
            print(f"{subject.name}: cases done, {seconds:.0f} s since the start", flush=True)
        end = began + 60 * arguments.minutes
        for seed in count(arguments.seed):
            # A single seed is asked for to repeat what it did.
            is_asked = arguments.only_chance and seed == arguments.seed
            if time.monotonic() > end and not is_asked:
                break
            for reference in untouched:
                case = at_random(seed, steps=reference.steps)
                work = _WORKS[seed % len(_WORKS)]
                results.append(trials.run(reference.run.subject, case, work, reference))
    print_table(results)
    print(f"\n{len(results)} runs, {time.monotonic() - began:.0f} s")
    wrong = any(outcome.wrong for outcome in results)
    if not wrong:
        shutil.rmtree(directory)
    return 1 if wrong else 0


@dataclass(slots=True, kw_only=True)
class _Trials:
    """Runs one case after another, and prints problems at once."""

    directory: Path
    cluster: LocalRay
    _done: int = 0

    def run(
        self, subject: Subject, case: Case, work: Work, reference: CaseResult | None = None
    ) -> CaseResult:
        """Run one case."""
        self._done += 1
        directory = self.directory / f"{self._done:05d}"
        directory.mkdir()
        run = ChaosRun(subject=subject, case=case, work=work, directory=directory)
        nodes = self.cluster.second_node() if case.on_two_nodes else contextlib.nullcontext()
        # The output of killed worker processes matters only if something is wrong.
        with (
            (directory / "output").open("w") as output,
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(output),
            nodes,
        ):
            outcome = judged(run, expected=reference.model if reference is not None else None)
        if outcome.wrong:
            print(f"\nWRONG: {subject.name}, {case.name}, {work}: see {directory}", flush=True)
            print("\n".join(f"  {what}" for what in outcome.wrong), flush=True)
            print("\n".join(f"  {fault}" for fault in case.faults), flush=True)
            chosen = f'--case "{case.name}"'
            if case.name.startswith("seed "):
                chosen = f"--only-chance --{case.name} --minutes 0.01"
            print(f"again: --backend {subject.backend.name} {chosen}", flush=True)
        else:
            shutil.rmtree(directory)
        return outcome


def _subjects(paths: Sequence[Path], backends: set[str]) -> Iterator[Subject]:
    """What the test classes in these files and directories are about."""
    sys.path.insert(0, str(Path.cwd()))
    for path in paths:
        for file in sorted(path.glob("test_*.py")) if path.is_dir() else [path]:
            relative = file.resolve().relative_to(Path.cwd()).with_suffix("")
            module = importlib.import_module(".".join(relative.parts))
            for name, class_ in vars(module).items():
                if not inspect.isclass(class_) or class_.__module__ != module.__name__:
                    continue
                if issubclass(class_, ChaosTier) and (
                    not backends or class_.backend.name in backends
                ):
                    yield replace(class_.subject(), name=name.removeprefix("Test"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="polytrain.testing.chaos_cli",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tests", type=Path, nargs="+", help="files with conformance classes, or directories of them"
    )
    parser.add_argument("--backend", action="append", default=[], help="only those of this backend")
    parser.add_argument("--case", default="", help="only the cases with this in their name")
    parser.add_argument("--minutes", type=float, default=0, help="in all, at least; see above")
    parser.add_argument("--seed", type=int, default=1, help="the first of those that choose")
    parser.add_argument("--only-chance", action="store_true", help="leave the list of cases out")
    return parser.parse_args()


_CPUS = 4


class LocalRay:
    """A Ray with several nodes on this machine, for the duration of a block.

    Its address is in a directory of its own: other programs that look for a Ray don't join it.
    """

    def __enter__(self) -> LocalRay:
        from ray.cluster_utils import Cluster

        mark_processes()
        # Short: the paths of Ray's sockets are in it, which have 107 characters at most.
        self._directory = tempfile.TemporaryDirectory(prefix="pt-", ignore_cleanup_errors=True)
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._directory.name
        head = {"num_cpus": _CPUS, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]
        del os.environ["RAY_TMPDIR"]
        if self._before is not None:
            os.environ["RAY_TMPDIR"] = self._before
        self._directory.cleanup()

    @contextmanager
    def second_node(self) -> Iterator[None]:
        """Add a second node, which may be lost."""
        node = self._cluster.add_node(num_cpus=1)
        self._cluster.wait_for_nodes()
        try:
            yield
        finally:
            self._cluster.remove_node(node, allow_graceful=False)


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


if __name__ == "__main__":
    sys.exit(main())
