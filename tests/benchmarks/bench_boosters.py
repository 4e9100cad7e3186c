"""Boosted trees from Parquet files to a model file: time and memory, against four others.

Everybody has two threads, the same files and the same parameters, evaluates nothing, and runs in a
fresh process, in turn: one process of the framework's own; ours, dask's and Ray Train's with two
workers. "With start" is from the start of that process until the model's file is there; "without
start" begins when Ray, or dask's cluster, is up, and for one process is the same less the start of
the interpreter. Imports of frameworks and trainers count. Who ends in a model that is worse, or
better, than the one process's isn't to be believed, and a note says so.

Ray Train's training functions are those of its documentation. They report every round, and a report
waits until its controller polls, every 2 s by default: so it is measured with the shortest interval
that makes sense too.

Memory is the peak of all of the party's processes, watched in rounds of their own because watching
slows a run down; "over cluster" is what of it wasn't there before training. How it is added up,
memory.py says.

With --resume, ours alone: a run that ends at 90 % of its rounds, and another that resumes from its
checkpoint. What that takes is compared with the last 10 % of a run without a break.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import booster_parties
import booster_resume
from booster_parties import PARAMS, WORKERS, Task, Training
from booster_resume import PART, Resumed
from harness import (
    OURS,
    RAY_TRAIN,
    Figure,
    Options,
    conclude,
    durations,
    parse,
    positive,
    require_ray_train,
    sizes,
    take_turns,
)
from higgs_data import LABEL, Higgs

_ALONE = "one process"
_DASK = "dask"
_RAY_TRAIN_TUNED = "… tuned"
_TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.01"}
_WITHIN = 0.005
"""What a model's AUC may be away from the one process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """How one is started."""

    name: str
    environment: Mapping[str, str]


_PARTIES = {
    OURS: Party(name="ours", environment={}),
    _ALONE: Party(name="alone", environment={}),
    _DASK: Party(name="dask", environment={}),
    RAY_TRAIN: Party(name="ray-train", environment={}),
    _RAY_TRAIN_TUNED: Party(name="ray-train", environment=_TUNED),
}
_QUICK = (OURS, _ALONE)
# How long a report waits makes no difference to memory.
_MEMORY_OF = (OURS, _ALONE, _DASK, _RAY_TRAIN_TUNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run. Times are seconds, sizes are bytes."""

    with_start: float
    without_start: float
    peak: int
    over_the_cluster: int
    auc: float
    accounts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is to say of a backend."""

    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    unbelieved: Sequence[str] = ()
    """Those whose models aren't sane."""


def measure(backend: str, party: Party, data: Higgs, rounds: int, *, watched: bool) -> Measured:
    """One run of one party, in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        task = Task(
            party=party.name,
            backend=backend,
            rounds=rounds,
            data=str(data.train),
            label=LABEL,
            directory=directory,
            watched=watched,
        )
        begun = time.time()
        found = Training(**_run(booster_parties.__file__, asdict(task), party.environment))
        return Measured(
            with_start=found.done - begun,
            without_start=found.done - found.up,
            peak=found.peak,
            over_the_cluster=found.peak - found.before,
            auc=_auc(backend, Path(found.model), data, rounds),
            accounts=found.accounts,
        )


def measure_resume(backend: str, data: Higgs, rounds: int) -> Resumed:
    """A run of ours without a break, and one in two parts, in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        task = {"backend": backend, "rounds": rounds, "data": str(data.train), "label": LABEL}
        return Resumed(**_run(booster_resume.__file__, {**task, "directory": directory}, {}))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if somebody isn't to be believed."""
    options = parse(
        argv, description=__doc__.splitlines()[0], repetitions=3, add_own=_add_own_options
    )
    rows, rounds = (8_000, 10) if options.quick else (options.own.rows, options.own.rounds)
    backends = [options.own.backend] if options.own.backend else list(PARAMS)
    notes = []
    with _made_data(options, rows) as data:
        notes.append(str(data))
        if options.own.resume:
            title = f"On from {PART:.0%} of {rounds} rounds, {WORKERS} workers"
            found = [_resume(backend, data, rounds, options) for backend in backends]
        else:
            if not options.quick:
                require_ray_train()
                _require_dask()
                notes += [f"tuned: {name}={value}" for name, value in _TUNED.items()]
            title = f"Parquet files to a model of {rounds} rounds, {WORKERS} threads"
            found = [_parties(backend, data, rounds, options) for backend in backends]
    code = conclude(
        title,
        [figure for each in found for figure in each.figures],
        notes=[*notes, *(note for each in found for note in each.notes)],
    )
    return 1 if any(each.unbelieved for each in found) else code


def _parties(backend: str, data: Higgs, rounds: int, options: Options) -> Found:
    """All who train with a backend."""
    chosen = {_ALONE, *(options.own.party or _PARTIES)}
    names = [name for name in _PARTIES if name in (_QUICK if options.quick else chosen)]
    run = partial(_measured, backend, data, rounds)
    watched = take_turns(
        {name: partial(run, name, watched=True) for name in names if name in _MEMORY_OF},
        repetitions=1,
        what=f"{backend}, memory",
    )
    taken = watched
    if not options.quick:
        taken = take_turns(
            {name: partial(run, name, watched=False) for name in names},
            repetitions=options.repetitions,
            what=backend,
        )
    notes = []
    for name in names:
        if accounts := taken[name][-1].accounts:
            found = ", ".join(f"{what} {durations(took)}" for what, took in accounts.items())
            notes.append(f"{backend}, {name}, last run: {found}")
    aucs = _of(taken, "auc")
    unbelieved = sorted({*_unbelieved(aucs), *_unbelieved(_of(watched, "auc"))})
    return Found(
        figures=[
            Figure(what=f"{backend}: with start", samples=_of(taken, "with_start")),
            Figure(what=f"{backend}: without start", samples=_of(taken, "without_start")),
            Figure(what=f"{backend}: memory", samples=_of(watched, "peak"), show=sizes),
            Figure(
                what=f"{backend}: … over cluster",
                samples=_of(watched, "over_the_cluster"),
                show=sizes,
            ),
            Figure(what=f"{backend}: AUC", samples=aucs, show=_scores),
        ],
        notes=[*notes, *(f"{backend}: {name} isn't to be believed" for name in unbelieved)],
        unbelieved=unbelieved,
    )


def _resume(backend: str, data: Higgs, rounds: int, options: Options) -> Found:
    """What it costs to go on."""
    taken = take_turns(
        {backend: partial(measure_resume, backend, data, rounds)},
        repetitions=options.repetitions,
        what="resume",
    )[backend]
    return Found(
        figures=[
            Figure(
                what=f"{backend}: resumed run",
                samples={
                    OURS: [each.resumed for each in taken],
                    "last 10 %": [each.last_rounds for each in taken],
                    "whole run": [each.whole for each in taken],
                },
            ),
            Figure(
                what=f"{backend}: … its first round",
                samples={
                    OURS: [each.resumed_first for each in taken],
                    "whole run": [each.whole_first for each in taken],
                },
            ),
        ]
    )


def _measured(backend: str, data: Higgs, rounds: int, name: str, *, watched: bool) -> Measured:
    return measure(backend, _PARTIES[name], data, rounds, watched=watched)


def _of(taken: Mapping[str, Sequence[Measured]], field: str) -> dict[str, list[float]]:
    return {name: [getattr(each, field) for each in runs] for name, runs in taken.items()}


def _unbelieved(aucs: Mapping[str, Sequence[float]]) -> list[str]:
    """Who has another model than that of one process: its time says nothing."""
    expected = aucs[_ALONE][0]
    return [
        name
        for name, values in aucs.items()
        if any(abs(value - expected) > _WITHIN for value in values)
    ]


def _scores(*aucs: float) -> str:
    return "–".join(f"{auc:.4f}" for auc in aucs)


def _auc(backend: str, model: Path, data: Higgs, rounds: int) -> float:
    """Of a model's file, which must have all rounds."""
    if backend == "xgboost":
        import xgboost

        trees = xgboost.Booster({"nthread": WORKERS}, model_file=model)
        assert trees.num_boosted_rounds() == rounds
        return data.auc(partial(trees.inplace_predict, validate_features=False))
    import lightgbm

    booster = lightgbm.Booster(model_file=model)
    assert booster.num_trees() == rounds
    return data.auc(partial(booster.predict, num_threads=WORKERS))


def _run(script: str, task: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a script in a fresh process; what it tells.

    Raises:
        SystemExit: it has failed; with the end of what it printed.
    """
    directory = Path(task["directory"])
    log = directory / "log"
    with log.open("w") as output:
        code = subprocess.run(
            [sys.executable, script, json.dumps(task)],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    if code != 0:
        tail = log.read_text(errors="replace")[-4000:]
        raise SystemExit(f"{Path(script).name} of {json.dumps(task)} ended with {code}:\n{tail}")
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def _require_dask() -> None:
    try:
        import dask.dataframe  # noqa: F401
        import distributed  # noqa: F401
    except ImportError:
        raise SystemExit(
            "dask can't be imported: pip install -r .ci/requirements/bench.txt "
            "(or measure ours beside one process alone, with --quick)"
        ) from None


@contextlib.contextmanager
def _made_data(options: Options, rows: int) -> Iterator[Higgs]:
    with contextlib.ExitStack() as stack:
        directory = options.own.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = Higgs(directory=directory.resolve(), rows=rows)
        data.make()
        yield data


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=positive, default=1_000_000, metavar="N")
    parser.add_argument("--rounds", type=positive, default=100, metavar="N")
    parser.add_argument("--backend", choices=list(PARAMS), help="both by default")
    parser.add_argument(
        "--turns",
        type=positive,
        dest="repetitions",
        default=argparse.SUPPRESS,
        metavar="N",
        help="as --repetitions",
    )
    parser.add_argument(
        "--party", choices=list(_PARTIES), action="append", help="beside the one process; all else"
    )
    parser.add_argument("--resume", action="store_true", help="what it costs to go on, instead")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="where the files are made, and kept"
    )


if __name__ == "__main__":
    sys.exit(main())
