"""Steps per second with no failure, against bare torchrun with DDP and bare xgboost.

One percent is less than two runs of the same program differ by. So ours and the peer live at the
same time, and take turns of a few tenths of a second, in which the other waits: what counts is how
much longer a turn of ours took than the peer's before and after it, as the median over many turns.
The row without reports is a control. Each worker has one thread, with everybody.

Where workers use all cores, what agents and driver do is taken from training: "beside" is their CPU
time for each step, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import overhead_loops
import psutil
from harness import (
    OURS,
    Bound,
    Figure,
    add_cluster,
    conclude,
    event_rates,
    parse,
    percentages,
    positive,
    running_ray,
    scaling_in,
    settle,
    take_turns,
)
from overhead_loops import on_command, torch_window, xgboost_window
from teams import Team

import polytrain
from polytrain import RunConfig, make_trainer

_WORKERS = 2
_TIMEOUT_S = 60.0
_PAUSE_S = 0.05
"""Between turns: what has been reported in one arrives before the next."""

_BARE = {"torch": "torchrun", "xgboost": "bare xgboost"}
_QUICK = ("xgboost",)
_EVERY = {"every step": 1, "every tenth": 10, "no reports": 0}
_A_PERCENT = Bound(factor=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds that a step took."""

    ours: float
    bare: float
    """The mean of the peer's turns before and after."""

    beside: float
    """CPU time of our agents and driver."""


Turns = dict[str, list[Turn]]
"""How often is reported → a turn of each round."""


def measure(framework: str, rounds: int, steps: int, cluster: Literal["ray", "local"]) -> Turns:
    """One run of ours beside one of the bare peer. Ray must be up."""
    window = torch_window() if framework == "torch" else xgboost_window()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as executor:
        directory = Path(name)
        ours, bare = Team(directory / "ours", _WORKERS), Team(directory / "bare", _WORKERS)
        trainer = make_trainer(
            framework,
            on_command(window, polytrain.report),
            train_loop_config={"address": ours.address},
            scaling_config=scaling_in(cluster, _WORKERS),
            run_config=RunConfig(storage_path=directory / "runs", progress=False),
        )
        settle()
        with _bare_workers(framework, bare.address):
            refereed = executor.submit(_referee, ours, bare, rounds, steps)
            result = trainer.fit()
            taken = refereed.result()
        # To be quick because reports get lost would be no achievement.
        found = sum(steps // every for every in _EVERY.values() if every)
        assert len(result.history) == rounds * found
        return taken


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv, description=__doc__.splitlines()[0], repetitions=3, add_own=_add_own_options
    )
    rounds, steps = (3, 10) if options.quick else (options.own.rounds, options.own.steps)
    frameworks = options.own.backend or (_QUICK if options.quick else _BARE)
    with running_ray(num_cpus=2 * _WORKERS):
        taken = take_turns(
            {of: partial(measure, of, rounds, steps, options.own.cluster) for of in frameworks},
            repetitions=options.repetitions,
            what="overhead",
        )
    figures, notes = [], []
    for framework, runs in taken.items():
        for reporting, every in _EVERY.items():
            turns = [turn for run in runs for turn in run[reporting]]
            overheads = [turn.ours / turn.bare - 1 for turn in turns]
            what = f"{framework}, {reporting}"
            rates = {
                OURS: [1 / turn.ours for turn in turns],
                _BARE[framework]: [1 / turn.bare for turn in turns],
            }
            bounds = [_A_PERCENT] if every and not options.quick else []
            figures += [
                Figure(what=f"{what}: steps", samples=rates, show=event_rates),
                Figure(
                    what=f"{what}: overhead",
                    samples={OURS: overheads},
                    bounds=bounds,
                    show=percentages,
                ),
                Figure(what=f"{what}: beside", samples={OURS: [turn.beside for turn in turns]}),
            ]
            notes.append(
                f"{what}: overhead {percentages(*_interval(overheads))} with 95 % confidence, "
                f"of {len(turns)} turns"
            )
    return conclude(f"Steps per second with no failure, {_WORKERS} workers", figures, notes=notes)


def _referee(ours: Team, bare: Team, rounds: int, steps: int) -> Turns:
    """Have both take turns; ours differ in how often is reported, in a new order each round."""
    turns: Turns = {reporting: [] for reporting in _EVERY}
    order, chance = list(_EVERY), random.Random(0)
    with ours.gathered() as step_ours, bare.gathered() as step_bare:
        spent = _Stopwatch()

        def turn(take: Callable[[int, int], float], every: int) -> float:
            took = take(steps, every)
            time.sleep(_PAUSE_S)
            return took

        turn(step_ours, 0)  # what is made once is made now
        turn(step_bare, 0)
        before = turn(step_bare, 0)
        for _ in range(rounds):
            chance.shuffle(order)
            for reporting in order:
                spent.reset()
                took = turn(step_ours, _EVERY[reporting])
                beside = spent.seconds() / steps
                after = turn(step_bare, 0)
                turns[reporting].append(Turn(ours=took, bare=(before + after) / 2, beside=beside))
                before = after
    return turns


class _Stopwatch:
    """CPU time of this process, the driver, and the agents that are there now."""

    def __init__(self) -> None:
        driver = psutil.Process()
        mine = {process.pid for process in driver.children(recursive=True)}
        # This passes over those that end while they are looked at.
        agents = [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid in mine and "ray::RayHost" in "".join(process.info["cmdline"] or ())
        ]
        # One host on Ray; otherwise the agents are a part of the driver.
        assert len(agents) <= 1
        self._processes = [driver, *agents]
        self._before = 0.0

    def reset(self) -> None:
        """Begin anew."""
        self._before = self._total()

    def seconds(self) -> float:
        """CPU time since then."""
        return self._total() - self._before

    def _total(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, by the order of the samples alone."""
    ordered, count = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(count)
    least, most = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    return ordered[max(least, 0)], ordered[min(most, count - 1)]


@contextlib.contextmanager
def _bare_workers(framework: str, address: str) -> Iterator[None]:
    """While the peer runs, which ends by itself once it is told nothing more."""
    command = [overhead_loops.__file__, framework, address]
    if framework == "torch":
        tracker = None
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_WORKERS}"]
        commands = [[*launcher, *command]]
    else:
        from xgboost.tracker import RabitTracker

        tracker = RabitTracker(n_workers=_WORKERS, host_ip="127.0.0.1", sortby="task")
        tracker.start()
        places = [{**tracker.worker_args(), "dmlc_task_id": str(n)} for n in range(_WORKERS)]
        commands = [[*command, json.dumps(place)] for place in places]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, *command], env=environment) for command in commands
    ]
    try:
        yield
        for process in processes:
            assert process.wait(_TIMEOUT_S) == 0
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        if tracker is not None:
            tracker.free()


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser)
    parser.add_argument(
        "--backend", action="append", choices=_BARE, help="only this one; again for more"
    )
    parser.add_argument(
        "--rounds", type=positive, default=100, metavar="N", help="turns of each in a run"
    )
    parser.add_argument("--steps", type=positive, default=50, metavar="N", help="steps in a turn")


if __name__ == "__main__":
    sys.exit(main())
