"""What each tracker costs per report: the controller's thread, and all of the driver's process.

    python tests/benchmarks/bench_trackers.py [REPORTS]

CPU time, not seconds that pass: trackers send on threads of their own. wandb runs offline.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytrain.linux.clock import Clock
from polytrain.record.ledger import Ledger
from polytrain.storage.location import Location
from polytrain.trackers import CSV, MLflow, Prometheus, TensorBoard, WandB
from polytrain.trackers.delivery import TrackedFacts
from polytrain.trackers.prometheus import exposed
from polytrain.trackers.tracker import Tracker
from polytrain.trackers.tracking import Tracking
from polytrain_plugins import RunInfo

_RUN = RunInfo(name="run", backend="reference", num_workers=1, path="")


def entries(reports: int) -> list[Mapping[str, Any]]:
    """The journal's entries of a run with four metrics, which a checkpoint covers at the end."""
    same = {"token": 1, "time": time.time()}
    launched = {"event": "Launched", "step": 0, "start": None, "world_size": 1, "attempt": 0}
    found: list[Mapping[str, Any]] = [{**same, "event": "Opened"}, {**same, **launched}]
    for n in range(reports):
        metrics = {"loss": 1 / (n + 1), "lr": 0.1, "eval": {"a": n, "b": 2 * n}}
        found.append({**same, "event": "Reported", "n": n, "step": n + 1, "metrics": metrics})
    return [*found, {**same, "event": "Committed", "step": reports, "checkpoint": "c"}]


def tracker_s(tracker: Tracker, directory: Path, reports: int) -> tuple[float, float]:
    """CPU seconds of the controller's thread, and of the process, for all reports."""
    facts = TrackedFacts(location=Location.of(directory), since=1)
    given = entries(reports)
    of_process = time.process_time()
    of_thread = 0.0
    with Tracking([tracker.resolved()], facts, own_token=1) as tracking:
        for start in range(0, len(given), 1000):
            began = time.thread_time()
            for entry in given[start : start + 1000]:
                tracking.follow(entry)
            of_thread += time.thread_time() - began
            # Reports come as fast as a run makes them at most: a thousand each 50 ms.
            time.sleep(0.05)
    return of_thread, time.process_time() - of_process


def prometheus_s(reports: int) -> float:
    """CPU seconds of the controller's thread for all reports."""
    from prometheus_client import CollectorRegistry

    ledger = Ledger()
    follow = exposed(Prometheus(CollectorRegistry()), _RUN, ledger, Clock())
    given = [each for each in entries(reports) if each["event"] == "Reported"]
    began = time.thread_time()
    for entry in given:
        follow(entry)
    return time.thread_time() - began


def main() -> None:
    reports = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    print(f"{reports} reports of four metrics; µs of CPU for each")
    print(f"{'tracker':<14}  {'controller':>10}  {'process':>8}")
    with tempfile.TemporaryDirectory() as name:
        database = f"sqlite:///{name}/mlflow.db"
        trackers = (CSV(), TensorBoard(), MLflow(database), WandB(mode="offline"))
        for tracker in trackers:
            directory = Path(name, tracker.name)
            directory.mkdir()
            # The first time, it imports its library.
            tracker_s(tracker, directory, 10)
            again = Path(name, f"{tracker.name}-again")
            again.mkdir()
            thread, process = (1e6 * s / reports for s in tracker_s(tracker, again, reports))
            print(f"{tracker.name:<14}  {thread:10.1f}  {process:8.1f}", flush=True)
    print(f"{'prometheus':<14}  {1e6 * prometheus_s(reports) / reports:10.1f}  {'':>8}")


if __name__ == "__main__":
    main()
