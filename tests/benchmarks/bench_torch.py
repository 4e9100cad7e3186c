"""Steps per second, and whole runs, of small networks against torchrun, Lightning and Accelerate.

Two workers with one thread each. For steps, all parties live at the same time and take turns, in a
new order each round: what is compared lies within a few seconds. Whole runs follow one another,
with as many checkpoints each; ours and Ray Train's begin with `fit()`, on a Ray that is up, the
others' with their command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import teams
import tensorflow_loops
import torch_loops
from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    conclude,
    event_rates,
    parse,
    percentages,
    positive,
    require_ray_train,
    running_ray,
    settle,
    take_turns,
)
from teams import Team

from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.workers.processes.cache import let_go

_WORKERS = 2
_WARM_UP = 10
"""Steps that don't count, before all others."""

_TORCHRUN, _LIGHTNING, _ACCELERATE = "torchrun", "Lightning", "Accelerate"
_TWO_PROCESSES = "two processes"
_TORCH = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_WORKERS}"

Party = Callable[[torch_loops.Config], None]
"""Runs from start to end when it is called."""


def measure_whole(party: Party, config: torch_loops.Config) -> float:
    """Seconds from a run's start to its end."""
    with tempfile.TemporaryDirectory() as directory:
        settle()
        begun = time.perf_counter()
        party({**config, "directory": directory})
        return time.perf_counter() - begun


def measure_steps(
    parties: Mapping[str, Party], network: str, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Party to the seconds that a step took it, in each round."""
    chance, taken = random.Random(0), {name: [] for name in parties}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = stack.enter_context(ThreadPoolExecutor(len(parties)))
        turns, ends = {}, []
        teams = ExitStack()
        with teams:
            for number, (name, party) in enumerate(parties.items()):
                team = Team(directory / str(number), _WORKERS)
                config = {"network": network, "address": team.address, "directory": str(directory)}
                ends.append(runs.submit(party, config))
                turns[name] = teams.enter_context(team.gathered())
                turns[name](_WARM_UP, 0)
            for _ in range(rounds):
                for name in chance.sample(list(turns), len(turns)):
                    taken[name].append(turns[name](steps, 0))
        for end in ends:
            end.result()
    return taken


def ours(backend: str, config: torch_loops.Config) -> None:
    """The first run of ours in a process."""
    let_go()
    make_trainer(
        backend,
        torch_loops.by_polytrain if backend == "torch" else tensorflow_loops.by_polytrain,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=_WORKERS),
        run_config=RunConfig(storage_path=config["directory"], progress=False),
    ).fit()


def ray_train(config: torch_loops.Config) -> None:
    """Ray Train's, as often as it is told to look for reports by default."""
    import ray.train
    from ray import cloudpickle
    from ray.train.torch import TorchConfig, TorchTrainer

    for module in (torch_loops, teams):
        cloudpickle.register_pickle_by_value(module)
    TorchTrainer(
        torch_loops.by_ray_train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS),
        run_config=ray.train.RunConfig(storage_path=config["directory"]),
    ).fit()


def command(party: str, launcher: tuple[str, ...], config: torch_loops.Config) -> None:
    """A peer's own command."""
    _run([*launcher, torch_loops.__file__, party, json.dumps(config)])


def two_processes(config: torch_loops.Config) -> None:
    """TensorFlow's strategy, with nobody around it."""
    tensorflow_loops.start_two(config, _environment())


def _run(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env=_environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} has failed:\n{done.stderr[-3000:]}")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def parties_of(network: str, *, quick: bool) -> dict[str, Party]:
    """Name to what runs it."""
    if network == "keras":
        return {OURS: partial(ours, "tensorflow"), _TWO_PROCESSES: two_processes}
    few: dict[str, Party] = {
        OURS: partial(ours, "torch"),
        _TORCHRUN: partial(command, "torchrun", _TORCH),
    }
    if quick:
        return few
    return {
        **few,
        _LIGHTNING: partial(command, "lightning", ()),
        _ACCELERATE: partial(command, "accelerate", ()),
        RAY_TRAIN: ray_train,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv, description=__doc__.splitlines()[0], repetitions=3, add_own=_add_own_options
    )
    networks = options.own.network or (["conv"] if options.quick else _NETWORKS)
    if not options.quick and networks != ["keras"]:
        require_ray_train()
    rounds, steps = (2, 5) if options.quick else (options.own.rounds, 20)
    whole_steps = 20 if options.quick else 400
    figures = []
    begun = time.perf_counter()
    with running_ray(num_cpus=2 * _WORKERS + 2):
        ray_start = time.perf_counter() - begun
        for network in networks:
            parties = parties_of(network, quick=options.quick)
            taken = measure_steps(parties, network, rounds=rounds, steps=steps)
            config = {"network": network, "steps": whole_steps, "every": whole_steps // 4}
            whole = take_turns(
                {name: partial(measure_whole, party, config) for name, party in parties.items()},
                repetitions=options.repetitions,
                what=network,
            )
            figures += _figures(network, taken, whole, bound=not options.quick)
    notes = [
        f"Whole runs: {whole_steps} steps, 4 checkpoints",
        f"Ray's own start, in nobody's time: {ray_start:.1f} s",
    ]
    return conclude(f"Small networks, {_WORKERS} workers", figures, notes=notes)


_NETWORKS = ["conv", "transformer", "keras"]


def _figures(
    network: str, steps: dict[str, list[float]], whole: dict[str, list[float]], *, bound: bool
) -> list[Figure]:
    bare, *others = [name for name in steps if name != OURS]
    overheads = [ours / its - 1 for ours, its in zip(steps[OURS], steps[bare], strict=True)]
    rates = {name: [1 / seconds for seconds in of] for name, of in steps.items()}
    ahead = [Bound(factor=1.0, of=name, at_least=True) for name in others]
    return [
        Figure(
            what=f"{network}: steps",
            samples=rates,
            show=event_rates,
            bounds=ahead if bound else [],
        ),
        Figure(
            what=f"{network}: overhead",
            samples={OURS: overheads},
            show=percentages,
            bounds=[Bound(factor=0.01)] if bound else [],
        ),
        Figure(
            what=f"{network}: whole run",
            samples=whole,
            bounds=[Bound(factor=1.0, of=name) for name in (bare, *others)] if bound else [],
        ),
    ]


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network", action="append", choices=_NETWORKS, help="only this one; again for more"
    )
    parser.add_argument(
        "--rounds", type=positive, default=50, metavar="N", help="turns of each party"
    )


if __name__ == "__main__":
    sys.exit(main())
