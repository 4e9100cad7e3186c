"""Spans as an OTLP receiver gets them over HTTP, whatever is killed; and one that never answers."""

from __future__ import annotations

import gzip
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.e2e.driver import start_driver

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.trackers import OpenTelemetry

STEPS, SAVED, DIES_AT = 8, 4, 7

SCRIPT = """
import tempfile
from pathlib import Path
from polytrain import Checkpoint
from polytrain.trackers import OpenTelemetry

is_second = Path("second").exists()

def train():
    checkpoint, done = polytrain.get_checkpoint(), 0
    if checkpoint is not None:
        done = int(Path(checkpoint.path, "step").read_text())
    for step in range(done + 1, 9):
        if step == 7 and not is_second:
            signal.pause()
        if step == 7 and polytrain.get_context().get_attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if step == 4:
                Path(directory, "step").write_text(str(step))
                kept = Checkpoint.from_directory(directory)
            polytrain.report({"loss": 1 / step}, checkpoint=kept)

make_trainer(
    "reference",
    train,
    scaling_config=ScalingConfig(num_workers=1, cluster="local"),
    run_config=RunConfig(
        name="watched",
        storage_path="runs",
        progress="none",
        observers=[OpenTelemetry(endpoint=ENDPOINT)],
        failure_config=FailureConfig(max_failures=1),
    ),
).fit()
"""


class Receiver(ThreadingHTTPServer):
    """An OTLP receiver that keeps the spans it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.held: list[socket.socket] = []
        """Requests that wait for an answer."""

        self.answers = threading.Event()
        self.answers.set()
        self._news = threading.Condition()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._news:
            for each in request.resource_spans:
                self.services |= {
                    known.value.string_value
                    for known in each.resource.attributes
                    if known.key == "service.name"
                }
                self.spans += (span for scope in each.scope_spans for span in scope.spans)
            self._news.notify_all()

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(wanted, timeout=60)

    def named(self, name: str) -> list[Span]:
        found = [span for span in self.spans if span.name == f"polytrain.{name}"]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.held.append(self.connection)
        self.server.answers.wait(60)
        self.server.take(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.answers.set()
            receiver.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, Any]:
    return {
        each.key.removeprefix("polytrain."): getattr(each.value, each.value.WhichOneof("value"))
        for each in span.attributes
    }


def test_a_receiver_gets_the_spans_of_each_driver_and_attempt(tmp_path: Path) -> None:
    began = time.time_ns()
    with receiving() as receiver:
        script = SCRIPT.replace("ENDPOINT", repr(receiver.endpoint))
        with start_driver(tmp_path, script) as driver:
            receiver.wait_for(lambda: bool(receiver.named("checkpoint")))
            driver.send_signal(signal.SIGKILL)
            driver.communicate(timeout=60)
        (orphan,) = receiver.spans
        assert attributes(orphan)["step"] == SAVED
        receiver.spans.clear()
        (tmp_path / "second").touch()
        resumed = time.time_ns()
        with start_driver(tmp_path, script) as driver:
            _, errors = driver.communicate(timeout=120)
            assert driver.returncode == 0, errors
    ended = time.time_ns()

    assert receiver.services == {"polytrain"}
    (run,), (first, second) = receiver.named("run"), receiver.named("attempt")
    (recovery,) = receiver.named("recovery")
    assert len(receiver.spans) == 4, receiver.spans
    assert {span.trace_id for span in receiver.spans} == {run.trace_id}
    assert {span.parent_span_id for span in (first, recovery, second)} == {run.span_id}
    # The first driver's own span died with it.
    assert orphan.trace_id != run.trace_id
    found = attributes(run)
    assert (found["run"], found["backend"], found["num_workers"]) == ("watched", "reference", 1)
    assert found["restarts"] == 2
    assert [attributes(each)["first_step"] for each in (first, second)] == [SAVED + 1] * 2
    for span in (first, recovery):
        found = attributes(span)
        assert (found["cause"], found["rank"], found["step"]) == ("worker_lost", 0, DIES_AT - 1)
    assert attributes(recovery)["resumed_at_step"] == SAVED + 1
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert second.status.code == run.status.code == Status.STATUS_CODE_UNSET
    assert began < orphan.start_time_unix_nano < resumed
    times = [
        run.start_time_unix_nano, first.start_time_unix_nano, first.end_time_unix_nano,
        recovery.start_time_unix_nano, recovery.end_time_unix_nano, second.end_time_unix_nano,
        run.end_time_unix_nano,
    ]  # fmt: skip
    assert [resumed, *times, ended] == sorted([resumed, *times, ended])


def fit(storage: Path, endpoint: str) -> polytrain.Result:
    return make_trainer(
        "reference",
        lambda: polytrain.report({"loss": 1.0}),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            storage_path=storage,
            progress="none",
            observers=[OpenTelemetry(endpoint=endpoint)],
        ),
    ).fit()


def test_a_receiver_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    with receiving() as receiver:
        receiver.answers.clear()
        assert fit(tmp_path, receiver.endpoint).finished
        # The exporter hasn't given up yet: its request is still open.
        assert len(receiver.held) == 1
        assert not select.select(receiver.held, (), (), 0)[0]
        receiver.answers.set()
        # What the process still gets through isn't lost.
        receiver.wait_for(lambda: len(receiver.spans) == 2)


def test_spans_have_the_name_of_the_service_that_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    with receiving() as receiver:
        for name in ("a", "b"):
            assert fit(tmp_path / name, receiver.endpoint).finished
        assert len(receiver.named("run")) == 2
        assert receiver.services == {"nightly"}
