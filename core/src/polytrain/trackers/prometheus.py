"""Exposes a run's newest figures to Prometheus, in a registry that a server exposes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

from polytrain.linux.clock import Clock
from polytrain.output.observers import RecordFollower
from polytrain.record.entries import Entry
from polytrain.record.journal import Take
from polytrain.record.ledger import Ledger
from polytrain.record.progress import Progress
from polytrain.text.metrics import flat
from polytrain.trackers.tracker import numbers
from polytrain_plugins import Outcome, RunInfo, hookimpl
from polytrain_plugins.installed import install_command

_LABEL = "run"


_HELP = {
    "step": "Last step of rank 0",
    "steps_per_second": "New steps per second of training",
    "goodput_ratio": "Fraction of time with new training progress",
    "restarts": "Attempts after the first",
    "committed_step": "Step of the newest committed checkpoint",
}


class Prometheus(RecordFollower):
    """Exposes a run's newest figures, and metrics as `polytrain_metric{run, metric}`.

    Pass it in `RunConfig(observers=[…])`. The figures are collected when the registry is read, so
    it costs training almost nothing. They stay after the run's end, with `polytrain_running` 0.
    Prometheus stores the values at each scrape, not every step.

    Args:
        registry: a `prometheus_client.CollectorRegistry`, by default the one that
            `prometheus_client.start_http_server` exposes.
        port: a port of 127.0.0.1 at which this process serves the registry; by default no port is
            opened, and the program's own server exposes it.

    Raises:
        ImportError: `prometheus_client` isn't installed.
        ValueError: `port` isn't a valid port.
        OSError: the port is taken.
    """

    def __init__(self, registry: Any = None, port: int | None = None) -> None:
        if find_spec("prometheus_client") is None:
            remedy = install_command("pip install 'polytrain[prometheus]'")
            raise ImportError(f"Prometheus needs prometheus_client, not installed here. {remedy}")
        given: object = port
        if port is not None and (type(given) is not int or not 0 < port < 65536):
            raise ValueError(f"port must be a number from 1 to 65535; got {port!r}")
        import prometheus_client

        self._lock = threading.Lock()
        self._runs: dict[str, Progress] = {}
        self._running: dict[str, bool] = {}
        registry = prometheus_client.REGISTRY if registry is None else registry
        if port is not None:
            prometheus_client.start_http_server(port, addr="127.0.0.1", registry=registry)
        earlier = _EXPORTERS.get(registry)
        if earlier is not None:
            # Two exporters would give each figure of a run twice, and a server takes the first.
            self._lock, self._runs, self._running = earlier._lock, earlier._runs, earlier._running
            with contextlib.suppress(KeyError):  # the program has removed it
                registry.unregister(earlier)
        registry.register(self)
        _EXPORTERS[registry] = self

    @hookimpl
    def polytrain_run_started(self, run: RunInfo) -> None:
        """Show the run as running."""
        self._set_running(run, True)

    @hookimpl
    def polytrain_run_ended(self, run: RunInfo, outcome: Outcome) -> None:
        """Show the run as ended."""
        self._set_running(run, False)

    def describe(self) -> list[Any]:
        """Return nothing, so that a registry collects nothing while this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield families of gauges for the registry."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            running = dict(self._running)
            now = [(name, _figures(run), dict(run.metrics)) for name, run in self._runs.items()]
        gauges = {
            name: GaugeMetricFamily(f"polytrain_{name}", text, labels=[_LABEL])
            for name, text in {"running": "1 while the run lasts", **_HELP}.items()
        }
        metric = GaugeMetricFamily(
            "polytrain_metric", "Metrics that rank 0 has reported last", labels=[_LABEL, "metric"]
        )
        for name, is_running in running.items():
            gauges["running"].add_metric([name], float(is_running))
        for name, figures, metrics in now:
            for gauge, value in figures.items():
                gauges[gauge].add_metric([name], value)
            for key, value in numbers(flat(metrics)).items():
                metric.add_metric([name, key], value)
        yield from gauges.values()
        yield metric

    def _set_running(self, run: RunInfo, is_running: bool) -> None:
        with self._lock:
            self._running[run.name] = is_running


_EXPORTERS: WeakKeyDictionary[Any, Prometheus] = WeakKeyDictionary()
"""Registry → its newest exporter, which shows the runs of all."""


def exposed(exporter: Prometheus, run: RunInfo, ledger: Ledger, clock: Clock) -> Take:
    """Expose a run, in place of an earlier one with the same name; return a function for entries.

    Args:
        ledger: the journal's ledger, which gets each entry before the function does.
        clock: the journal's clock.
    """
    progress = Progress(ledger=ledger, since=clock.now(), world_size=max(1, run.num_workers))
    with exporter._lock:
        exporter._runs[run.name] = progress

    def take(entry: Entry) -> None:
        with exporter._lock:
            progress.take(entry)

    return take


def _figures(run: Progress) -> dict[str, float]:
    """Return the figures that are known, by the name of their gauge."""
    found = {
        "step": run.step,
        "steps_per_second": run.steps_per_s,
        "goodput_ratio": run.ledger.goodput,
        "restarts": run.ledger.restarts,
        "committed_step": run.committed,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
