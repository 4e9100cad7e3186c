"""What it costs to see a run: the command line's start, a page, and progress bars in the driver.

Commands and pages are processes of their own, with all that they import.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import OURS, Bound, Figure, conclude, parse, percentages, sizes

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

_COUNTS = (100, 10_000, 1_000_000)
_RUNS = 20
_BARS = 8
_BARS_FOR_S = 20.0


class _Measured:
    """Processes that were waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def run(self, *arguments: str) -> None:
        """Run the command line once."""
        before, began = _cpu_of_children(), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "polytrain", *arguments], check=True, capture_output=True
        )
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(_cpu_of_children() - before)

    def figures(self, what: str, bound_s: float | None = None) -> Iterator[Figure]:
        """Yield both figures."""
        bounds = [] if bound_s is None else [Bound(factor=bound_s)]
        yield Figure(what=what, samples={OURS: self.seconds}, bounds=bounds)
        yield Figure(what=f"{what}: CPU", samples={OURS: self.cpu_seconds})


def command_line(directory: Path, repetitions: int, *, is_quick: bool) -> Iterator[Figure]:
    """Yield the time of a command that does next to nothing, and of a list of runs."""
    for number in range(_RUNS):
        write_run(directory / f"run-{number}", 100)
    cases = {"--help": ["--help"], f"runs, of {_RUNS}": ["runs", str(directory)]}
    for what, arguments in cases.items():
        measured = _Measured()
        for _ in range(repetitions):
            measured.run(*arguments)
        yield from measured.figures(what, 0.2 if what == "--help" and not is_quick else None)


def pages(directory: Path, count: int, repetitions: int) -> Iterator[Figure]:
    """Yield the size of a page, and the time of the command that writes it."""
    run, target, measured = directory / f"{count}", directory / "run.html", _Measured()
    write_run(run, count)
    for _ in range(repetitions):
        measured.run("report", str(run), "-o", str(target))
    yield from measured.figures(f"page of {count:,} reports")
    size = float(target.stat().st_size)
    bound = Bound(factor=200e3)
    what = f"page of {count:,} reports: size"
    yield Figure(what=what, samples={OURS: [size]}, bounds=[bound], show=sizes)


def write_run(directory: Path, count: int) -> None:
    """Write the journal of a run with this many reports, in a process of its own."""
    directory.mkdir(parents=True)
    script = str(Path(__file__).with_name("bench_journal.py"))
    command = [sys.executable, script, "write", str(directory), str(count)]
    subprocess.run(command, check=True, capture_output=True)


def with_bar() -> None:
    """A rank with a bar that moves fifty times a second, until it is stopped."""
    from tqdm import tqdm

    for _ in tqdm(range(10**9)):
        time.sleep(0.02)
        if polytrain.checkpoint_requested():
            return


def without_bar() -> None:
    """The same without a bar."""
    while not polytrain.checkpoint_requested():
        time.sleep(0.02)


def driver_cpu(function: Callable[[], None], seconds: float) -> float:
    """Return the share of a CPU that the driver uses while eight ranks train."""
    with tempfile.TemporaryDirectory() as directory:
        run = make_trainer(
            "reference",
            function,
            scaling_config=ScalingConfig(num_workers=_BARS, cluster="local"),
            run_config=RunConfig(name="bars", storage_path=directory, progress="plain"),
        ).fit(wait=False)
        log = Path(directory, "bars", "journal.jsonl")
        while log.read_text().count('"event": "Joined"') < _BARS if log.exists() else True:
            time.sleep(0.1)
        # What a bar first shows is passed on at once.
        time.sleep(3)
        before, began = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        used = (time.process_time() - before) / (time.perf_counter() - began)
        run.stop("measured")
        run.result()
    return used


def bars(*, is_quick: bool) -> Iterator[Figure]:
    """Yield the driver's share of a CPU, with and without bars."""
    seconds = 2.0 if is_quick else _BARS_FOR_S
    idle, used = (driver_cpu(function, seconds) for function in (without_bar, with_bar))
    yield Figure(what=f"driver of {_BARS} ranks", samples={OURS: [idle]}, show=percentages)
    yield Figure(
        what=f"driver of {_BARS} ranks with a bar",
        samples={OURS: [used]},
        bounds=[] if is_quick else [Bound(factor=0.01)],
        show=percentages,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=5)
    counts = _COUNTS[:2] if options.quick else _COUNTS
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        figures += command_line(
            Path(directory, "runs"), options.repetitions, is_quick=options.quick
        )
        for count in counts:
            figures += pages(Path(directory), count, options.repetitions)
    # The ranks sleep: they share what CPUs there are.
    os.environ["POLYTRAIN_LOCAL_CPUS"] = f"{_BARS}"
    figures += bars(is_quick=options.quick)
    return conclude("seeing a run, from this machine's disk", figures)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
