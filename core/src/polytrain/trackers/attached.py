"""Attaches trackers and exporters to a run, to follow its record while it lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from polytrain.linux.clock import Clock
from polytrain.record.entries import Entry
from polytrain.record.journal import Take
from polytrain.record.ledger import Ledger
from polytrain.record.progress import Progress
from polytrain.run.run import Run
from polytrain.storage.location import Location
from polytrain.trackers.delivery import TrackedFacts
from polytrain.trackers.given import tracker_problems, trackers_of
from polytrain.trackers.prometheus import Figures, Prometheus
from polytrain.trackers.tracking import Tracking
from polytrain_plugins import Problem, RunInfo

__all__ = ["followed", "place_problems", "tracker_problems"]


def place_problems(track: Any, observers: Any, location: Location) -> Iterator[Problem]:
    """Yield the problems of a run's trackers with the run's location.

    Args:
        track: `RunConfig.track`.
        observers: `RunConfig.observers`.
        location: the run's location.
    """
    for tracker in trackers_of(track, observers):
        yield from tracker.place_problems(location.address, is_directory=location.is_local)


@contextlib.contextmanager
def followed(run: Run, ledger: Ledger, is_urgent: Callable[[], bool]) -> Iterator[Take]:
    """Send a run to its trackers, and expose it; yield a function for each entry of its journal.

    Args:
        run: the run.
        ledger: the journal's ledger, which gets each entry before the function does.
        is_urgent: returns whether the program wants to end without waiting for trackers.
    """
    own = run.lease.token
    facts = TrackedFacts(
        location=run.location,
        since=own if run.past is None else run.past.since_token,
    )
    expose = exposed_figures(run.spec.run_config.observers, run.info, ledger, run.lease.clock)
    with Tracking(
        trackers_of(run.spec.run_config.track, run.spec.run_config.observers),
        facts,
        own_token=own,
        check_lease=run.lease.check,
        is_urgent=is_urgent,
    ) as tracking:

        def take(entry: Entry) -> None:
            tracking.follow(entry)
            expose(entry)

        yield take


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
