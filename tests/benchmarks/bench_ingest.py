"""Rows per second into a training loop that does nothing, and the memory that this takes.

Files are in the page cache. A rate is all rows over the time from the first worker's first batch
being asked for to the last worker's last one; what was started before doesn't count. The bare scan
is Arrow's, in one process with as many threads as there are workers; nothing is handed to anybody,
and of three passes the fastest counts.

Memory is the peak of the whole run over what was there before it: an idle Ray that has started its
workers. So whatever is started or imported for the run counts, with everybody. It is measured in
rounds of its own, each with a new Ray, because watching it slows a run down. How it is added up,
memory.py says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ingest_loops
import parquet_data
from harness import (
    OURS,
    RAY_TRAIN,
    Bound,
    Figure,
    Options,
    conclude,
    parse,
    require_ray_train,
    row_rates,
    running_ray,
    settle,
    sizes,
    start_workers,
    take_turns,
)
from ingest_loops import Batches, Pass, training_function
from memory import Watch
from parquet_data import Files

from polytrain import DataConfig, RunConfig, ScalingConfig, make_trainer

_WORKERS = 2
_ITEMS = 500_000
_LOADER = "DataLoader"
_LOADER_INLINE = "… no worker"
_SCAN = "bare scan"

_TENSORS = f"{OURS}, tensors"
_WINDOWS = f"{OURS}, windows"
_RAY_TENSORS = f"{RAY_TRAIN}, tensors"
_MEMORY_OF = (OURS, _WINDOWS, RAY_TRAIN, _LOADER, _SCAN)
_MEMORY_OF_QUICK = (OURS,)

_AHEAD = [Bound(factor=1, of=peer, at_least=True) for peer in (RAY_TRAIN, _LOADER)]
_OF_THE_SCAN = Bound(factor=0.8, of=_SCAN, at_least=True)
_A_QUARTER = Bound(factor=0.25, of=RAY_TRAIN)


def measure_ours(data: Any, batches: Batches, *, config: DataConfig | None = None) -> list[Pass]:
    """One run of ours. Ray must be up.

    Args:
        data: the data set; None if the training function reads files by itself.
        batches: what a worker iterates over.
        config: how we read the data.
    """
    with tempfile.TemporaryDirectory() as name:
        trainer = make_trainer(
            "torch",
            training_function(batches),
            train_loop_config={"directory": name},
            datasets=None if data is None else {"train": data},
            dataset_config={"train": config} if config else None,
            scaling_config=ScalingConfig(num_workers=_WORKERS),
            run_config=RunConfig(storage_path=Path(name, "runs"), progress=False),
        )
        trainer.fit()
        return _passes(Path(name))


def measure_ray_train(files: Files, batches: Batches) -> list[Pass]:
    """The same of Ray Train's."""
    import ray.data
    import ray.train
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as name:
        trainer = TorchTrainer(
            training_function(batches),
            train_loop_config={"directory": name},
            datasets={"train": ray.data.read_parquet(str(files.directory))},
            scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS),
            run_config=ray.train.RunConfig(storage_path=str(Path(name, "runs"))),
        )
        trainer.fit()
        return _passes(Path(name))


def measure_scan(files: Files) -> list[Pass]:
    """Arrow alone."""
    command = [sys.executable, ingest_loops.__file__, str(files.directory), str(_WORKERS)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return [Pass(**json.loads(output))]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(
        argv,
        description=__doc__.splitlines()[0],
        repetitions=3,
        add_own=parquet_data.add_arguments,
    )
    if not options.quick:
        require_ray_train()
    figures = _other_figures(options)
    with parquet_data.made_files(options) as files:
        parties = _parties(files, options.own.batch_size, with_ray_train=not options.quick)
        with running_ray(num_cpus=2 * _WORKERS):
            rates = take_turns(
                {name: partial(_rate, files.rows, party) for name, party in parties.items()},
                repetitions=options.repetitions,
                what="rows per second",
            )
        # Each has a Ray of its own, which takes its time to come and go.
        watched = _MEMORY_OF_QUICK if options.quick else _MEMORY_OF
        peaks = take_turns(
            {name: partial(_peak, parties[name]) for name in watched if name in parties},
            repetitions=1,
            what="memory",
        )
    figures = [
        *figures,
        *_figures("", rates, [*_AHEAD, _OF_THE_SCAN], row_rates),
        *_figures("memory, ", peaks, [_A_QUARTER], sizes),
    ]
    if options.quick:
        figures = [Figure(what=of.what, samples=of.samples, show=of.show) for of in figures]
    title = f"Rows per second, {_WORKERS} workers, batches of {options.own.batch_size}"
    return conclude(title, figures, notes=[str(files), 'windows: arrays, with shuffle="window"'])


def _parties(
    files: Files, batch_size: int, *, with_ray_train: bool
) -> dict[str, Callable[[], list[Pass]]]:
    ours = partial(measure_ours, files.directory)
    tensors = ingest_loops.our_batches(batch_size, tensors=True)
    windows = DataConfig(shuffle="window")
    parties: dict[str, Callable[[], list[Pass]]] = {
        OURS: partial(ours, ingest_loops.our_batches(batch_size)),
        _TENSORS: partial(ours, tensors),
        _WINDOWS: partial(ours, ingest_loops.our_batches(batch_size), config=windows),
    }
    if with_ray_train:
        theirs = partial(measure_ray_train, files)
        parties[RAY_TRAIN] = partial(theirs, ingest_loops.ray_batches(batch_size))
        parties[_RAY_TENSORS] = partial(theirs, ingest_loops.ray_batches(batch_size, tensors=True))
    paths = list(map(str, files.paths))
    for name, num_workers in ((_LOADER, 1), (_LOADER_INLINE, 0)):
        loader = ingest_loops.loader_batches(paths, batch_size, num_workers=num_workers)
        parties[name] = partial(measure_ours, None, loader)
    return parties | {_SCAN: partial(measure_scan, files)}


def _figures(
    what: str, taken: dict[str, list[float]], bounds: list[Bound], show: Callable[..., str]
) -> list[Figure]:
    """Ours beside the peers, for each way to read."""
    peers = (_LOADER, _LOADER_INLINE, _SCAN)
    kinds = {
        "arrays": {OURS: OURS, RAY_TRAIN: RAY_TRAIN, **{peer: peer for peer in peers}},
        "tensors": {OURS: _TENSORS, RAY_TRAIN: _RAY_TENSORS, **{peer: peer for peer in peers}},
        "windows": {OURS: _WINDOWS},
    }
    return [
        Figure(
            what=what + kind,
            samples={name: taken[party] for name, party in names.items() if party in taken},
            bounds=bounds,
            show=show,
        )
        for kind, names in kinds.items()
        if names[OURS] in taken
    ]


def _other_figures(options: Options) -> list[Figure]:
    """Rows per second of other types than numbers, and of items in any order."""
    batch_size = options.own.batch_size
    batches = ingest_loops.our_batches(batch_size)
    figures = []
    with running_ray(num_cpus=2 * _WORKERS):
        for kind, row_groups in (("strings", 2), ("tensors", 1)):
            with parquet_data.made_files(options, kind, row_groups) as files:
                parties = {OURS: partial(measure_ours, files.directory, batches)}
                if not options.quick:
                    theirs = ingest_loops.ray_batches(batch_size)
                    parties[RAY_TRAIN] = partial(measure_ray_train, files, theirs)
                parties[_SCAN] = partial(measure_scan, files)
                figures.append(_figure_of(f"columns of {kind}", files.rows, parties, options))
        rows = 20_000 if options.quick else _ITEMS
        parties = {
            OURS: partial(
                measure_ours, ingest_loops.items(rows), batches, config=DataConfig(shuffle=True)
            )
        }
        for name, num_workers in ((_LOADER, 1), (_LOADER_INLINE, 0)):
            loader = ingest_loops.loader_items(rows, batch_size, num_workers=num_workers)
            parties[name] = partial(measure_ours, None, loader)
        figures.append(_figure_of("items, in any order", rows, parties, options))
    return figures


def _figure_of(
    what: str, rows: int, parties: dict[str, Callable[[], list[Pass]]], options: Options
) -> Figure:
    samples = take_turns(
        {name: partial(_rate, rows, party) for name, party in parties.items()},
        repetitions=options.repetitions,
        what=f"rows per second, {what}",
    )
    return Figure(what=what, samples=samples, bounds=_AHEAD, show=row_rates)


def _rate(rows: int, party: Callable[[], list[Pass]]) -> float:
    """Rows per second of one run."""
    settle()
    passes = party()
    # Rows that are fast because they get lost would be no achievement.
    assert sum(each.rows for each in passes) == rows
    assert sum(each.sum_of_ids for each in passes) == rows * (rows - 1) // 2
    took = max(each.ended for each in passes) - min(each.begun for each in passes)
    return rows / took


def _peak(party: Callable[[], list[Pass]]) -> float:
    """Bytes of one run at its peak, over those of what there was before."""
    with running_ray(num_cpus=2 * _WORKERS):
        start_workers(2 * _WORKERS)
        settle()
        with Watch() as watched:
            party()
    return watched.memory.peak - watched.memory.before


def _passes(directory: Path) -> list[Pass]:
    notes: list[dict[str, Any]] = [
        json.loads(note.read_text()) for note in directory.glob("pass-*")
    ]
    assert len(notes) == _WORKERS
    return [Pass(**note) for note in notes]


if __name__ == "__main__":
    sys.exit(main())
