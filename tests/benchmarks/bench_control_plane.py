"""What the driver of a run of up to 10,000 workers costs: CPU time and memory.

The driver is real, from `Trainer.fit` to its last line; its hosts are simulated (`simulated_hosts`)
and answer without processes. A run starts, each rank reports, a checkpoint gets a part of each, a
worker is lost and then a host, a node is drained, and the run ends. Every event wakes the driver by
itself, and after a loss all other ranks raise before they are killed: that is the most work.

Each run is a process of its own.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
from harness import OURS, Bound, Figure, conclude, parse, sizes, take_turns
from simulated_hosts import SimulatedHosts, whole_story

_WORLD_SIZES = (100, 1_000, 3_000, 10_000)
_LEAST_OF_SLOPE = 1_000
"""Workers from which what a run costs in any case doesn't count."""

_RESTART = "worker lost"
_RESTART_S = {1_000: 0.5, 10_000: 5.0}
_BYTES_PER_WORKER = 50e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one run."""

    seconds: dict[str, float]
    """Part of the run → CPU seconds."""

    memory: float
    """Bytes by which the process has grown at most."""


def run(workers: int) -> Costs:
    """Train on simulated hosts, in this process."""
    logging.disable(logging.WARNING)
    hosts = SimulatedHosts(workers, whole_story)
    with tempfile.TemporaryDirectory() as storage:
        before = psutil.Process().memory_info().rss
        result = hosts.fit(Path(storage))
    # A driver that is quick because it has stopped listening would be no achievement.
    assert result.error is None
    assert result.restarts == 3
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Costs(seconds=hosts.seconds, memory=most - before)


def measure(workers: int) -> Costs:
    """Do the same in a process of its own."""
    answer = subprocess.run(
        [sys.executable, __file__, "--workers", str(workers)], stdout=subprocess.PIPE, check=True
    )
    return Costs(**json.loads(answer.stdout))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv,
        description=__doc__.splitlines()[0],
        repetitions=3,
        add_own=lambda parser: parser.add_argument(
            "--workers", type=int, help="one run of as many, whose costs are printed as JSON"
        ),
    )
    if options.own.workers is not None:
        print(json.dumps(asdict(run(options.own.workers))))
        return 0
    world_sizes = _WORLD_SIZES[:1] if options.quick else _WORLD_SIZES
    taken = take_turns(
        {f"{size:,} workers": partial(measure, size) for size in world_sizes},
        repetitions=options.repetitions,
        what="driver",
    )
    figures = []
    for size, (name, runs) in zip(world_sizes, taken.items(), strict=True):
        figures += [
            Figure(
                what=f"{name}: {part}",
                samples={OURS: [costs.seconds[part] for costs in runs]},
                bounds=[Bound(factor=_RESTART_S[size])]
                if part == _RESTART and size in _RESTART_S
                else [],
            )
            for part in runs[0].seconds
        ]
        figures.append(
            Figure(
                what=f"{name}: memory of each",
                samples={OURS: [costs.memory / size for costs in runs]},
                bounds=[Bound(factor=_BYTES_PER_WORKER)] if size >= _LEAST_OF_SLOPE else [],
                show=sizes,
            )
        )
    by_size = dict(zip(world_sizes, taken.values(), strict=True))
    notes = [] if options.quick else [_growth(by_size[_LEAST_OF_SLOPE], by_size[_WORLD_SIZES[-1]])]
    return conclude("CPU time of the driver, hosts simulated", figures, notes=notes)


def _growth(few: Sequence[Costs], many: Sequence[Costs]) -> str:
    """Return with which power of the number of workers each part grows."""
    times = _WORLD_SIZES[-1] / _LEAST_OF_SLOPE

    def power(part: str) -> float:
        medians = [statistics.median(run.seconds[part] for run in runs) for runs in (few, many)]
        return math.log(medians[1] / medians[0], times)

    powers = ", ".join(f"{part} {power(part):.2f}" for part in few[0].seconds)
    return f"From 1,000 to 10,000 workers it grows with this power of their number: {powers}."


if __name__ == "__main__":
    sys.exit(main())
