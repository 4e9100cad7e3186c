"""A run with a killed worker, as Prometheus sees it."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.listeners import free_ports

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, make_trainer
from polytrain.trackers import Prometheus
from polytrain_plugins import RunInfo, hookimpl

STEPS, SAVED, DIES_AT = 8, 4, 7


def train() -> None:
    checkpoint, done = polytrain.get_checkpoint(), 0
    if checkpoint is not None:
        done = int(Path(checkpoint.path, "step").read_text())
    for step in range(done + 1, STEPS + 1):
        if step == DIES_AT and polytrain.get_context().get_attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if step == SAVED:
                Path(directory, "step").write_text(str(step))
                kept = Checkpoint.from_directory(directory)
            polytrain.report({"loss": 1 / step, "eval": {"<a>": step}}, checkpoint=kept)


class Scraper:
    """Asks for the figures when the first attempt has ended."""

    def __init__(self, address: str) -> None:
        self.address, self.seen = address, dict[Any, float]()

    @hookimpl
    def polytrain_attempt_ended(self) -> None:
        self.seen = self.seen or scraped(self.address)


def scraped(address: str) -> dict[Any, float]:
    text = urlopen(address, timeout=30).read().decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert {each.labels["run"] for each in samples} == {"watched"}
    return {each.labels.get("metric", each.name): each.value for each in samples}


@dataclass(frozen=True)
class Watched:
    result: polytrain.Result
    between: dict[Any, float]
    at_the_end: dict[Any, float]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}/metrics"
    scraper = Scraper(address)
    result = make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=1, cluster="local"),
        run_config=RunConfig(
            name="watched",
            storage_path=tmp_path_factory.mktemp("runs"),
            progress="none",
            observers=(Prometheus(CollectorRegistry(), port=port), scraper),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    return Watched(result, scraper.seen, scraped(address))


def test_prometheus_sees_a_run_while_it_lasts_and_after_it(watched: Watched) -> None:
    wanted = {"polytrain_running": 1, "polytrain_step": DIES_AT - 1, "polytrain_restarts": 0}
    wanted["loss"] = 1 / (DIES_AT - 1)
    assert {name: watched.between[name] for name in wanted} == wanted
    wanted = {"polytrain_running": 0, "polytrain_step": STEPS, "polytrain_restarts": 1}
    wanted |= {"polytrain_committed_step": SAVED, "loss": 1 / STEPS, "eval/<a>": STEPS}
    wanted["polytrain_goodput_ratio"] = watched.result.ledger.goodput
    assert {name: watched.at_the_end[name] for name in wanted} == wanted


def test_the_port_of_prometheus_is_open_to_this_machine_alone() -> None:
    [port] = free_ports(1)
    Prometheus(CollectorRegistry(), port=port)
    assert "polytrain" in urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    # An address of this machine that only a server on all addresses answers.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=30)


def test_a_second_exporter_shows_each_run_once() -> None:
    """As if each run of a program had its own, or a cell of a notebook was run again."""
    registry = CollectorRegistry()
    names = ["first", "second", "first"]
    exporters = [Prometheus(registry) for _ in names]
    for exporter, name in zip(exporters, names, strict=True):
        exporter.polytrain_run_started(
            RunInfo(name=name, backend="reference", num_workers=1, path="/a", cluster="here")
        )
    shown = [
        (each.name, sample.labels["run"], sample.value)
        for each in registry.collect()
        for sample in each.samples
    ]
    assert shown == [("polytrain_running", "first", 1), ("polytrain_running", "second", 1)]
    registry.unregister(exporters[-1])
    Prometheus(registry)
    assert len([each for each in registry.collect() if each.name == "polytrain_running"]) == 1


def test_a_wrong_port_is_reported() -> None:
    with pytest.raises(ValueError, match="port must be a number from 1 to 65535; got 70000"):
        Prometheus(port=70000)


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytrain.trackers.prometheus.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"not installed here\. .*prometheus"):
        Prometheus()
