"""Cuts hosts off at random, and measures how long a run takes to train again without them.

    PYTHONPATH=. python tests/benchmarks/bench_cuts.py --cuts 100 --seed 0

A run has several cuts. In the end it must have trained as a run without any has: bench_cuts prints
what is wrong, and the seed that repeats it. It takes Linux and root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.hosts.cuts import Cluster, cluster, planned, run

from polytrain.testing.hosts import why_no_hosts

_BACKENDS = ("torch", "xgboost", "reference")
_CUTS_OF_A_RUN = 7
_RUNS_OF_A_CLUSTER = 4
_PARTS = {
    "detection": "the loss is known",
    "kill": "the other processes are gone",
    "relaunch": "each rank has a place and its data",
    "join": "all ranks have joined",
    "step": "the first new step",
}


def main() -> int:
    """Run the cuts; 1 if anything is wrong."""
    options = _options()
    reason = why_no_hosts()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    known = [json.loads(line) for line in _lines(options.kept)]
    missing = list(_missing(options, known))
    while missing:
        with tempfile.TemporaryDirectory(prefix="polytrain-cuts-") as directory:
            shared = Path(directory)
            with cluster(shared) as found:
                for _ in range(min(_RUNS_OF_A_CLUSTER, len(missing))):
                    seed, cuts = missing.pop(0)
                    record = _recorded(found, seed, cuts, shared / f"seed-{seed}", options)
                    known.append(record)
                    if record["wrong"]:
                        # The next run mustn't suffer from it.
                        break
    _print(known)
    return any(record["wrong"] for record in known)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=100, help="100 by default")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has 1 more")
    parser.add_argument("--backend", action="append", choices=_BACKENDS, help="again for more")
    parser.add_argument("--kept", type=Path, help="a file of results: what it has isn't run again")
    return parser.parse_args()


def _lines(kept: Path | None) -> list[str]:
    return kept.read_text().splitlines() if kept is not None and kept.exists() else []


def _missing(
    options: argparse.Namespace, known: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, int]]:
    """The seeds of the runs that aren't known, each with its number of cuts."""
    seeds = {record["seed"] for record in known}
    for at, first in enumerate(range(0, options.cuts, _CUTS_OF_A_RUN)):
        if options.seed + at not in seeds:
            yield options.seed + at, min(_CUTS_OF_A_RUN, options.cuts - first)


def _recorded(
    found: Cluster, seed: int, cuts: int, directory: Path, options: argparse.Namespace
) -> Mapping[str, Any]:
    plan = planned(seed, cuts=cuts, backends=options.backend or _BACKENDS)
    began = time.monotonic()
    outcome = run(found, plan, directory)
    seconds = time.monotonic() - began
    record = {"seed": seed, "seconds": seconds, **asdict(outcome)}
    for wrong in outcome.wrong:
        print(f"WRONG, seed {seed}: {wrong}", flush=True)
    print(
        f"seed {seed}, {plan.backend}: {len(outcome.struck)} cuts, {outcome.restarts} restarts,"
        f" {outcome.steps} steps, {seconds:.0f} s",
        flush=True,
    )
    if options.kept is not None:
        with options.kept.open("a") as file:
            print(json.dumps(record), file=file)
    return record


def _print(known: Sequence[Mapping[str, Any]]) -> None:
    cuts = [
        (struck["cut"], parts)
        for record in known
        for struck, parts in zip(record["struck"], record["parts"], strict=True)
    ]
    failures = [(cut, parts) for cut, parts in cuts if parts is not None]
    print(
        f"\n{len(cuts)} cuts in {len(known)} runs, {len(failures)} of them failures,"
        f" {sum(record['restarts'] for record in known)} restarts,"
        f" {sum(record['drivers'] - 1 for record in known)} drivers started again;"
        f" wrong: {sum(len(record['wrong']) for record in known)}"
    )
    groups = {
        "a rank's host, with a standby": [
            parts for cut, parts in failures if cut["with_standby"] and cut["hit"] != "driver"
        ],
        "without one, or the driver's host": [
            parts for cut, parts in failures if not cut["with_standby"] or cut["hit"] == "driver"
        ],
    }
    for title, group in groups.items():
        if group:
            print(f"\n| {title}: {len(group)} | median | 9 of 10 | most |\n|---|---|---|---|")
            for name, what in _PARTS.items():
                print(f"| {what} | {_quantiles([parts[name] for parts in group])} |")
            print(f"| **all** | {_quantiles([sum(parts.values()) for parts in group])} |")


def _quantiles(seconds: Sequence[float]) -> str:
    nine_of_ten = sorted(seconds)[max(0, -(-9 * len(seconds) // 10) - 1)]
    shown = (statistics.median(seconds), nine_of_ten, max(seconds))
    return " | ".join(f"{each:.2f} s" for each in shown)


if __name__ == "__main__":
    sys.exit(main())
