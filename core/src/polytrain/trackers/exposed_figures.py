"""Folds a run's journal into figures for monitoring systems that poll them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from polytrain.linux.clock import Clock
from polytrain.record.entries import Entry
from polytrain.record.journal import Take
from polytrain.record.ledger import Ledger
from polytrain.record.progress import Progress
from polytrain.trackers.prometheus import Figures, Prometheus
from polytrain_plugins import RunInfo


def exposed_figures(observers: Iterable[Any], run: RunInfo, ledger: Ledger, clock: Clock) -> Take:
    """Expose a run to the monitoring systems among its observers; return a function for entries.

    Args:
        observers: the run's observers.
        run: the run.
        ledger: the journal's ledger, which gets each entry before the function does.
        clock: the journal's clock.
    """
    exporters = [each for each in observers if isinstance(each, Prometheus)]
    if not exporters:
        return lambda entry: None
    lock = threading.Lock()
    progress = Progress(ledger=ledger, since=clock.now(), world_size=max(1, run.num_workers))

    def follow(entry: Entry) -> None:
        with lock:
            progress.take(entry)

    def figures() -> Figures:
        with lock:
            return Figures(
                step=progress.step,
                steps_per_s=progress.steps_per_s,
                goodput=ledger.goodput,
                restarts=ledger.restarts,
                committed_step=progress.committed,
                metrics=dict(progress.metrics),
            )

    for each in exporters:
        each.expose(run, figures)
    return follow
