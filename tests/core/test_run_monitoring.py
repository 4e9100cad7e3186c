"""A run with a killed worker, as Prometheus and OpenTelemetry see it."""

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
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import polytrain
from polytrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig, make_trainer
from polytrain.trackers import OpenTelemetry, Prometheus
from polytrain_plugins import hookimpl

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
    spans: list[Any]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/metrics"
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    scraper = Scraper(address)
    result = make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=1, cluster="local"),
        run_config=RunConfig(
            name="watched",
            storage_path=tmp_path_factory.mktemp("runs"),
            progress="none",
            observers=(
                Prometheus(CollectorRegistry(), port=port),
                OpenTelemetry(provider),
                scraper,
            ),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    return Watched(result, scraper.seen, scraped(address), list(memory.get_finished_spans()))


def test_prometheus_sees_a_run_while_it_lasts_and_after_it(watched: Watched) -> None:
    wanted = {"polytrain_running": 1, "polytrain_step": DIES_AT - 1, "polytrain_restarts": 0}
    wanted["loss"] = 1 / (DIES_AT - 1)
    assert {name: watched.between[name] for name in wanted} == wanted
    wanted = {"polytrain_running": 0, "polytrain_step": STEPS, "polytrain_restarts": 1}
    wanted |= {"polytrain_committed_step": SAVED, "loss": 1 / STEPS, "eval/<a>": STEPS}
    wanted["polytrain_goodput_ratio"] = watched.result.ledger.goodput
    assert {name: watched.at_the_end[name] for name in wanted} == wanted


def test_the_port_of_prometheus_is_open_to_this_machine_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Prometheus(CollectorRegistry(), port=port)
    assert "polytrain" in urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    # An address of this machine that only a server on all addresses answers.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=30)


def test_spans_say_what_befell_the_run(watched: Watched) -> None:
    by_name: dict[str, list[Any]] = {}
    for span in watched.spans:
        by_name.setdefault(span.name, []).append(span)
    (run,) = by_name["polytrain.run"]
    assert run.attributes["polytrain.run"] == "watched"
    assert run.attributes["polytrain.restarts"] == 1
    assert run.status.status_code is StatusCode.UNSET
    children = [span for span in watched.spans if span is not run]
    assert {span.parent.span_id for span in children} == {run.context.span_id}
    first, second = by_name["polytrain.attempt"]
    assert (first.status.status_code, second.status.status_code) == (
        StatusCode.ERROR,
        StatusCode.UNSET,
    )
    assert second.attributes["polytrain.first_step"] == SAVED + 1
    (recovery,) = by_name["polytrain.recovery"]
    for span in (first, recovery):
        assert span.attributes["polytrain.rank"] == 0
        assert span.attributes["polytrain.cause"] == "worker_lost"
        assert span.attributes["polytrain.step"] == DIES_AT - 1
    assert recovery.attributes["polytrain.resumed_at_step"] == SAVED + 1
    assert first.end_time <= recovery.start_time < recovery.end_time <= second.end_time
    (checkpoint,) = by_name["polytrain.checkpoint"]
    assert checkpoint.attributes["polytrain.step"] == SAVED


def test_an_endpoint_that_is_away_fails_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = make_trainer(
        "reference",
        lambda: polytrain.report({"loss": 1.0}),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            storage_path=tmp_path,
            progress="none",
            observers=(OpenTelemetry(endpoint=f"http://127.0.0.1:{port}/v1/traces"),),
        ),
    ).fit()
    assert result.metrics == {"loss": 1.0}


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: Prometheus(port=70000), "port must be a number from 1 to 65535; got 70000"),
        (lambda: OpenTelemetry(endpoint="localhost:4318"), "endpoint must be an address such as"),
        (lambda: OpenTelemetry(TracerProvider(), endpoint="http://a"), "not both"),
    ],
)
def test_wrong_arguments_are_reported(make: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        make()


@pytest.mark.parametrize(
    ("module", "kind", "extra"),
    [("prometheus", Prometheus, "prometheus"), ("opentelemetry", OpenTelemetry, "otel")],
)
def test_a_missing_library_names_the_command(
    module: str, kind: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"polytrain.trackers.{module}.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"not installed here\. .*{extra}"):
        kind()
