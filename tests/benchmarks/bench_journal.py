"""What millions of reports cost the driver: its memory, CPU time for each, and a resume.

Each report has a loss, an accuracy and a learning rate. Each part is a process of its own: the
memory is what that has more at its peak, everything that it imports aside.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import OURS, Bound, Figure, conclude, parse, sizes

from polytrain.events.attempt import Reported
from polytrain.record.entries import Launched, Opened
from polytrain.record.journal import Journal
from polytrain.run.resume import previous_run
from polytrain.storage.location import Location

_COUNTS = (10_000, 1_000_000, 5_000_000)
_MOST_MEMORY = Bound(factor=200e6)
_THREE_SECONDS = Bound(factor=3.0)


def write(directory: str, count: int) -> None:
    """As a driver does that is killed at the end."""
    journal = Journal(Location.of(directory).open(), token=1)
    identity = {"backend": "reference", "options": {}, "datasets": {}}
    journal.write(Opened(anew=True, identity=identity, world_size=2))
    journal.write(Launched(attempt=0, step=0, start=None, world_size=2))
    for step in range(1, count + 1):
        metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step, "learning_rate": 1e-3 * step}
        journal.report(Reported(attempt=0, rank=0, step=step, metrics=metrics))


def read(directory: str, count: int) -> None:
    """As a driver does that resumes the run."""
    history = previous_run(Location.of(directory).open()).history
    assert history is not None
    assert len(history.reports) == count
    assert history.metrics["loss"] == 1 / count


class Measured(NamedTuple):
    """Of a part, in a process of its own."""

    seconds: float
    cpu_seconds: float
    memory: float
    """Bytes."""


def measured(part: str, directory: str, count: int) -> Measured:
    """Measure a part."""
    command = [sys.executable, __file__, part, directory, str(count)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return Measured(*map(float, printed))


def of(count: int, *, is_bound: bool, repetitions: int) -> list[Figure]:
    """The figures of this many reports."""
    writing, reading = [], []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as directory:
            writing.append(measured("write", directory, count))
            reading.append(measured("read", directory, count))
            size = float(Path(directory, "journal.jsonl").stat().st_size)
    memory = [_MOST_MEMORY] if is_bound else []
    reported = f"{count:,} reports"
    return [
        Figure(what=f"{reported}: one", samples={OURS: [it.cpu_seconds / count for it in writing]}),
        Figure(
            what=f"{reported}: memory",
            samples={OURS: [it.memory for it in writing]},
            bounds=memory,
            show=sizes,
        ),
        Figure(
            what=f"{reported}: resume",
            samples={OURS: [it.seconds for it in reading]},
            bounds=[_THREE_SECONDS] if is_bound else [],
        ),
        Figure(
            what=f"{reported}: CPU time of a resume",
            samples={OURS: [it.cpu_seconds for it in reading]},
        ),
        Figure(
            what=f"{reported}: memory of a resume",
            samples={OURS: [it.memory for it in reading]},
            bounds=memory,
            show=sizes,
        ),
        Figure(what=f"{reported}: journal", samples={OURS: [size]}, show=sizes),
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=3)
    counts = _COUNTS[:1] if options.quick else _COUNTS
    figures = [
        figure
        for count in counts
        for figure in of(count, is_bound=not options.quick, repetitions=options.repetitions)
    ]
    return conclude("reports of three numbers, on this machine's disk", figures)


def _be_part(part: str, directory: str, count: int) -> None:
    before = _peak()
    begun, cpu_begun = time.perf_counter(), time.process_time()
    {"write": write, "read": read}[part](directory, count)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    print(seconds, cpu_seconds, _peak() - before, flush=True)
    # What isn't closed stays as a killed driver leaves it.
    os._exit(0)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if sys.argv[1:2] in (["write"], ["read"]):
        _be_part(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.exit(main())
