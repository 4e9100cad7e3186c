"""Time of a step with virtual workers, against DDP with gradients accumulated by hand.

Both have the same global batch, cut into as many micro-batches; one thread for each worker. Where
there are as many workers as virtual workers, nothing is accumulated. Runs take turns; the time of a
step is the median of a run's. Some rows are compiled by inductor, on both sides.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import OURS, Bound, Figure, conclude, durations, parse, sizes, take_turns
from tests.gradient_memory import peak

from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain_torch.collectives.tree_sums import all_subtrees

_DDP = "DDP"
_MICRO_ROWS = 32
_WIDTH = 512
_WORLDS = ((2, 2), (1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (4, 8))
"""Workers, virtual workers."""

_COMPILED = ((2, 2), (2, 4))
"""Those that are measured with `torch.compile` too."""


def train(config: Mapping[str, Any]) -> None:
    """Report the seconds of a step, and the CPU time and the peak of the memory of this rank."""
    import contextlib
    import resource
    import statistics
    import time

    import torch

    from polytrain import get_context, report
    from polytrain.torch import micro_batches, prepare_data_loader, prepare_model

    torch.manual_seed(0)
    width, steps, virtual = _WIDTH, config["steps"], config["virtual_workers"]
    network = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )
    if config["compiles"]:
        network.compile()
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = (steps + 1) * virtual * _MICRO_ROWS
    data = torch.utils.data.TensorDataset(
        torch.randn(rows // 8, width).repeat(8, 1), torch.randint(10, (rows,))
    )
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=_MICRO_ROWS))
    accumulated = 1 if config["ours"] else virtual // get_context().get_world_size()
    batches, taken = iter(loader), []
    for step in range(steps + 1):
        began = time.perf_counter()
        if step == 1:
            cpu_began = time.process_time()
        optimizer.zero_grad()
        for number in range(accumulated):
            is_last = number == accumulated - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                for x, y in micro_batches(next(batches)):
                    (torch.nn.functional.cross_entropy(model(x), y) / accumulated).backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    report(
        {
            "step_s": statistics.median(taken[1:]),
            "cpu_s": (time.process_time() - cpu_began) / steps,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    )


def measure(
    workers: int, virtual: int, steps: int, *, ours: bool, compiles: bool
) -> Mapping[str, float]:
    """What rank 0 reports."""
    with tempfile.TemporaryDirectory() as storage:
        metrics = (
            make_trainer(
                "torch",
                train,
                train_loop_config={
                    "steps": steps,
                    "virtual_workers": virtual,
                    "ours": ours,
                    "compiles": compiles,
                },
                scaling_config=ScalingConfig(
                    num_workers=workers,
                    virtual_workers=virtual if ours else None,
                    cluster="local",
                ),
                run_config=RunConfig(storage_path=storage, progress=False),
            )
            .fit()
            .metrics
        )
    return {name: float(value) for name, value in metrics.items()}


def bytes_of_a_ring(workers: int, virtual: int) -> float:
    """Bytes that all ranks send to others, as a share of a ring's, if no memory is shared."""
    # All-to-all: a piece of each subtree to every other rank. All-gather: a piece to each.
    return (len(all_subtrees(virtual, workers)) + workers) / (2 * workers)


def sets_of_gradients(workers: int, virtual: int | None) -> float:
    """Most sets that a step of rank 0 has, beside DDP's own buckets."""
    with tempfile.TemporaryDirectory() as storage:
        return peak(Path(storage), workers, virtual)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=5)
    steps = 3 if options.quick else 60
    # Workers share cores where there are fewer: with everybody alike.
    os.environ.setdefault("POLYTRAIN_LOCAL_CPUS", "8")
    figures = []
    worlds = _WORLDS[2:3] if options.quick else _WORLDS
    plain = [(*world, False) for world in worlds]
    compiled = [(*world, True) for world in _COMPILED if not options.quick]
    for workers, virtual, compiles in plain + compiled:
        name = f"{workers} of {virtual}{', compiled' if compiles else ''}"
        taken = take_turns(
            {
                party: partial(
                    measure, workers, virtual, steps, ours=party == OURS, compiles=compiles
                )
                for party in (OURS, _DDP)
            },
            repetitions=options.repetitions,
            what=name,
        )
        most = 1.05 if workers == virtual else 1.15
        for what, key, show in (
            ("a step", "step_s", durations),
            ("CPU of a step", "cpu_s", durations),
            ("memory", "memory", sizes),
        ):
            figures.append(
                Figure(
                    what=f"{name}: {what}",
                    samples={party: [each[key] for each in them] for party, them in taken.items()},
                    bounds=[Bound(factor=most, of=_DDP)]
                    if key == "step_s" and not options.quick
                    else [],
                    show=show,
                )
            )
    ratios = ", ".join(
        f"{workers} of {virtual} {bytes_of_a_ring(workers, virtual):.2f}"
        for virtual in (4, 8)
        for workers in range(2, virtual + 1)
    )
    sets = ", ".join(
        f"{workers} of {virtual} {sets_of_gradients(workers, virtual):.2f} "
        f"({1 + math.log2(virtual):.0f})"
        for workers, virtual in worlds
    )
    parameters = 2 * _WIDTH * (_WIDTH + 1) + 2 * _WIDTH + 10 * (_WIDTH + 1)
    return conclude(
        f"Workers of virtual workers; {np.format_float_scientific(parameters, 1)} parameters, "
        f"{_MICRO_ROWS} rows in a micro-batch",
        figures,
        notes=[
            f"Bytes between nodes / a ring's: {ratios}.",
            f"Sets of gradients at most (bound): {sets}. DDP: {sets_of_gradients(2, None):.2f}.",
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
