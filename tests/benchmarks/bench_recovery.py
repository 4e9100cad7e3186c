"""From the death of a worker to training again, against Ray Train and torchrun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    add_cluster,
    conclude,
    parse,
    positive,
    require_ray_train,
    running_ray,
    take_turns,
)
from recovery_loop import Recovery
from recovery_peers import Torchrun, measure_ours, measure_ray_train

_STEP_WITHIN_S = {"torch": 0.3, "xgboost": 0.3, "lightgbm": 0.3, "tensorflow": 0.5}
"""With 2 workers."""

_WORLD_SIZES = (2, 4)
_QUICK = ("torch", "lightgbm")
_A_TENTH = Bound(factor=0.1, of=RAY_TRAIN)
_TORCHRUN = "torchrun"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__, repetitions=5, add_own=_add_own_options)
    if not options.quick:
        require_ray_train()
    backends = options.own.backend or (_QUICK if options.quick else _STEP_WITHIN_S)
    world_sizes = options.own.workers or (_WORLD_SIZES[:1] if options.quick else _WORLD_SIZES)
    figures: list[Figure] = []
    notes = []
    for workers in world_sizes:
        with running_ray(num_cpus=2 * workers):
            for backend in backends:
                torchrun = Torchrun(workers=workers)
                parties: dict[str, Callable[[], Recovery | None]] = {
                    OURS: partial(measure_ours, backend, workers, options.own.cluster)
                }
                if not options.quick:
                    parties[RAY_TRAIN] = partial(measure_ray_train, backend, workers)
                    if backend == "torch":
                        parties[_TORCHRUN] = torchrun.measure
                what = f"{backend}, {workers} workers"
                taken = take_turns(parties, repetitions=options.repetitions, what=what)
                bounds = [] if options.quick else _bounds(backend, workers)
                # Of restarts that never worked there is nothing to show but their number.
                worked = {name: [run for run in runs if run] for name, runs in taken.items()}
                shown = {name: runs for name, runs in worked.items() if runs}
                figures += _figures(what, shown, bounds)
                notes += [str(torchrun)] if torchrun.tried else []
    return conclude("From the SIGKILL of a worker to the next attempt's", figures, notes=notes)


def _bounds(backend: str, workers: int) -> list[Bound]:
    return [Bound(factor=_STEP_WITHIN_S[backend])] if workers == _WORLD_SIZES[0] else []


def _figures(what: str, taken: dict[str, list[Recovery]], bounds: list[Bound]) -> Iterator[Figure]:
    yield Figure(
        what=f"{what}: first line",
        samples={name: [run.first_line for run in runs] for name, runs in taken.items()},
        bounds=[_A_TENTH],
    )
    yield Figure(
        what=f"{what}: first step",
        samples={name: [run.first_step for run in runs] for name, runs in taken.items()},
        bounds=bounds,
    )


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser)
    parser.add_argument(
        "--backend", action="append", choices=_STEP_WITHIN_S, help="only this one; again for more"
    )
    parser.add_argument(
        "--workers",
        action="append",
        type=positive,
        metavar="N",
        help=f"only so many; {' and '.join(map(str, _WORLD_SIZES))} by default",
    )


if __name__ == "__main__":
    sys.exit(main())
