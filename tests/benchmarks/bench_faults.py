"""Faults of hosts: how long each backend takes to train again, and whether it is restarted.

    PYTHONPATH=. python tests/benchmarks/bench_faults.py --backend torch

Two workers and a standby are on a host each. The faults come one after another, to the host of
rank 1. In the end the run must have trained as one without faults. bench_faults prints a table, in
Markdown. It takes Linux and root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.hosts.cuts import Plan, Running, Stuck, cluster, parts_of

from polytrain.testing.hosts import Host, why_no_hosts
from polytrain.testing.network import cut

_BACKENDS = ("torch", "xgboost", "lightgbm", "tensorflow", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a host."""

    act: Callable[[Host], object]
    undo: Callable[[Host], object] = lambda host: None


def _frozen(seconds: float) -> Callable[[Host], None]:
    def act(host: Host) -> None:
        host.freeze()
        time.sleep(seconds)
        host.thaw()

    return act


def _kill_a_worker(host: Host) -> None:
    # The newest is the last that a zygote has forked. The shell doesn't match.
    host.run("pkill -KILL --newest --full [p]olytrain.workers")


FAULTS: Mapping[str, Fault] = {
    "a worker process is killed": Fault(act=_kill_a_worker),
    "all processes of a host are killed": Fault(act=lambda host: host.run("kill -KILL -1")),
    "a host is cut off for good": Fault(act=Host.cut_off, undo=Host.heal),
    "cut off for 3 s": Fault(act=cut),
    "frozen for 10 s": Fault(act=_frozen(10)),
    "frozen for 60 s": Fault(act=_frozen(60)),
    "connections are reset": Fault(act=Host.reset_connections),
}


def main() -> int:
    """Measure; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=_BACKENDS, help="again for more")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="again for more")
    parser.add_argument("--kept", type=Path, help="a file of results: what it has isn't run again")
    options = parser.parse_args()
    reason = why_no_hosts()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    faults = options.fault or list(FAULTS)
    lines = options.kept.read_text().splitlines() if options.kept and options.kept.exists() else ()
    known = [json.loads(line) for line in lines]
    done = {record["backend"] for record in known}
    missing = [each for each in options.backend or _BACKENDS if each not in done]
    if missing:
        with tempfile.TemporaryDirectory(prefix="polytrain-faults-") as directory:
            for record in _records(missing, faults, Path(directory)):
                known.append(record)
                if options.kept is not None:
                    with options.kept.open("a") as file:
                        print(json.dumps(record), file=file)
    _print(known, faults)
    return any(record["wrong"] for record in known)


def _records(
    backends: Sequence[str], faults: Sequence[str], directory: Path
) -> Iterator[Mapping[str, Any]]:
    with cluster(directory) as found:
        for backend in backends:
            plan = Plan(backend=backend, driver_has_rank=False, cuts=())
            running = Running(found, plan, directory / backend)
            times: list[float] = []
            wrong = running.outcome.wrong
            try:
                with running:
                    for name in faults:
                        fault = FAULTS[name]
                        print(f"{backend}: {name}", file=sys.stderr, flush=True)
                        times.append(running.suffer("rank 1", fault.act, fault.undo))
            except Stuck as error:
                wrong.append(str(error))
            figures = [
                _figures(lines, at) for at, lines in zip(times, running.windows(times), strict=True)
            ]
            for each in wrong:
                print(f"WRONG, {backend}: {each}", file=sys.stderr, flush=True)
            cells = dict(zip(faults, figures, strict=False))
            yield {"backend": backend, "wrong": wrong, "cells": cells}
            if wrong:
                # The next run mustn't suffer from it.
                return


def _figures(lines: Sequence[Mapping[str, Any]], at: float) -> Mapping[str, Any]:
    """What the journal says of one fault."""
    failures = [line["failure"]["kind"] for line in lines if line.get("failure")]
    parts = parts_of(lines, at)
    reports = [line["time"] for line in lines if line["event"] in ("Reported", "Reports")]
    pauses = [after - before for before, after in pairwise([at, *reports])]
    return {
        "kinds": failures,
        "detection": parts.detection if parts is not None else None,
        "step": parts.total if parts is not None else max(pauses, default=None),
    }


def _print(known: Sequence[Mapping[str, Any]], faults: Sequence[str]) -> None:
    print(f"| | {' | '.join(record['backend'] for record in known)} |")
    print(f"|---|{'---|' * len(known)}")
    for name in faults:
        cells = [_cell(record["cells"].get(name)) for record in known]
        print(f"| {name} | {' | '.join(cells)} |")


def _cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    step = f"{figures['step']:.1f}"
    if figures["detection"] is None:
        return f"– / {step}"
    again = f" ({len(figures['kinds'])} restarts)" if len(figures["kinds"]) > 1 else ""
    return f"{figures['detection']:.1f} / {step}{again}"


if __name__ == "__main__":
    sys.exit(main())
