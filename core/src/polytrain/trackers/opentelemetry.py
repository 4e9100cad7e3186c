"""Spans of a run for OpenTelemetry: the run, its attempts, recoveries and checkpoints."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

from polytrain_plugins import (
    Attempt,
    CheckpointInfo,
    FailureInfo,
    Outcome,
    Report,
    RunInfo,
    hookimpl,
)
from polytrain_plugins.installation import install_command

_EXPORT_TIMEOUT_S = 5.0
_SEND_EVERY_MS = 1000
_END_WITHIN_S = 10.0
"""Seconds that the end of a run waits for a receiver that has answered."""

_FIRST_ANSWER_WITHIN_S = 2.0
"""Seconds that it waits for one that hasn't answered yet, or not the last time."""

_UNKNOWN_SERVICE = "unknown_service"


class OpenTelemetry:
    """Records spans of a run. Give it in `RunConfig(observers=[OpenTelemetry()])`.

    `polytrain.run` has the children `polytrain.attempt`, `polytrain.recovery` (from a failed
    attempt's end to the next one's first report) and `polytrain.checkpoint` (the moment of the
    commit). Attributes say step, rank and cause. One object is for one run at a time.

    Args:
        tracer_provider: a provider of OpenTelemetry; by default the program's own, from
            `opentelemetry.trace.get_tracer_provider()`.
        endpoint: in place of a provider, the address of an OTLP receiver over HTTP, such as
            "http://localhost:4318/v1/traces". Spans are sent on a thread of their own; those that
            can't be sent are lost.

    Raises:
        ImportError: OpenTelemetry isn't installed.
        ValueError: both are given, or the endpoint isn't an address of HTTP.
    """

    def __init__(self, tracer_provider: Any = None, *, endpoint: str | None = None) -> None:
        if tracer_provider is not None and endpoint is not None:
            raise ValueError("give tracer_provider or endpoint, not both")
        given: object = endpoint
        if given is not None and not (
            isinstance(given, str) and given.startswith(("http://", "https://"))
        ):
            raise ValueError(
                "endpoint must be an address such as http://localhost:4318/v1/traces; "
                f"got {given!r}"
            )
        modules = ["opentelemetry"]
        if endpoint is not None:
            modules += ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]
        missing = [name for name in modules if not _is_installed(name)]
        if missing:
            remedy = install_command("pip install 'polytrain[otel]'")
            raise ImportError(
                f"OpenTelemetry needs {' and '.join(missing)}, not installed here. {remedy}"
            )
        self._given = tracer_provider
        self._endpoint = endpoint
        self._provider: Any = None
        self._receiver: _Receiver | None = None
        self._tracer: Any = None
        self._run: Any = None
        self._attempt: Any = None
        self._recovery: Any = None

    @hookimpl
    def polytrain_run_started(self, run: RunInfo) -> None:
        """Start the span of the run."""
        from opentelemetry import trace

        self._provider = self._sending_provider() if self._endpoint is not None else None
        provider = self._provider or self._given or trace.get_tracer_provider()
        self._tracer = provider.get_tracer("polytrain")
        self._attempt = self._recovery = None
        # Not the current span: a span of the program's own that lasts now is its parent.
        self._run = self._tracer.start_span("polytrain.run", attributes=_of_run(run))

    @hookimpl
    def polytrain_attempt_started(self, attempt: Attempt) -> None:
        """Start the span of an attempt."""
        attributes = {
            "polytrain.attempt": attempt.number,
            "polytrain.num_workers": attempt.num_workers,
            "polytrain.first_step": attempt.first_step,
        }
        self._attempt = self._child("polytrain.attempt", attributes)

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        """End a recovery: training has made a step."""
        if self._recovery is not None:
            self._recovery.set_attribute("polytrain.resumed_at_step", report.step)
            self._end_recovery()

    @hookimpl
    def polytrain_checkpoint_committed(self, checkpoint: CheckpointInfo) -> None:
        """Record the commit of a checkpoint."""
        attributes = {"polytrain.step": checkpoint.step, "polytrain.checkpoint": checkpoint.path}
        self._child("polytrain.checkpoint", attributes).end()

    @hookimpl
    def polytrain_attempt_ended(self, outcome: Outcome) -> None:
        """End the attempt's span, with its cause; if it has failed, a recovery starts."""
        if self._attempt is not None:
            _end(self._attempt, outcome)
            self._attempt = None
        self._end_recovery()
        if outcome.failures:
            self._recovery = self._child("polytrain.recovery", _of_failure(outcome.failures[0]))

    @hookimpl
    def polytrain_run_ended(self, outcome: Outcome) -> None:
        """End all spans; those for an endpoint are sent."""
        if self._run is None:
            return
        self._end_recovery()
        if self._attempt is not None:
            _end(self._attempt, outcome)
        self._run.set_attribute("polytrain.restarts", outcome.restarts)
        _end(self._run, outcome)
        self._run = self._attempt = None
        if self._provider is not None:
            sends = threading.Thread(target=self._provider.shutdown, daemon=True)
            sends.start()
            answers = self._receiver is not None and self._receiver.answers
            sends.join(_END_WITHIN_S if answers else _FIRST_ANSWER_WITHIN_S)

    def _child(self, name: str, attributes: dict[str, Any]) -> Any:
        from opentelemetry import trace

        inside = trace.set_span_in_context(self._run)
        return self._tracer.start_span(name, context=inside, attributes=attributes)

    def _end_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.end()
            self._recovery = None

    def _sending_provider(self) -> Any:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith(_UNKNOWN_SERVICE):
            # Neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES has a name.
            resource = resource.merge(Resource({"service.name": "polytrain"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=self._endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._receiver = _Receiver(exporter)
        provider.add_span_processor(
            # A driver that is killed loses what it hasn't sent.
            BatchSpanProcessor(self._receiver, schedule_delay_millis=_SEND_EVERY_MS)
        )
        return provider


class _Receiver:
    """An exporter that remembers whether its receiver took the last spans."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.answers = False

    def export(self, spans: Any) -> Any:
        result = self._exporter.export(spans)
        self.answers = result.name == "SUCCESS"
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> Any:
        return self._exporter.force_flush(timeout_millis)


def _end(span: Any, outcome: Outcome) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("polytrain.reason", outcome.reason)
    if outcome.stopped is not None:
        span.set_attribute("polytrain.stopped", str(outcome.stopped))
    if outcome.failures:
        span.set_attributes(_of_failure(outcome.failures[0]))
    if not outcome.succeeded and not outcome.planned:
        span.set_status(Status(StatusCode.ERROR, outcome.reason))
    span.end()


def _of_run(run: RunInfo) -> dict[str, Any]:
    return {
        "polytrain.run": run.name,
        "polytrain.backend": run.backend,
        "polytrain.num_workers": run.num_workers,
        "polytrain.path": run.path,
    }


def _of_failure(failure: FailureInfo) -> dict[str, Any]:
    found = {
        "polytrain.cause": failure.kind,
        "polytrain.message": failure.message,
        "polytrain.step": failure.step,
    }
    return found if failure.rank is None else {**found, "polytrain.rank": failure.rank}


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
