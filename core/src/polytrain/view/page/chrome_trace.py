"""A run's timeline in the trace event format, which Chrome's tracing and Perfetto open. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polytrain.view.page.facts import Facts
from polytrain.view.page.timeline_chart import shown_ranks

_RUN = 0
"""The row of the run; rank r has row r + 1."""


def trace_of(facts: Facts) -> Mapping[str, Any]:
    """Return the trace: a row for the run and for each of up to 32 ranks, by the time of day."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(facts))}


def _events(facts: Facts) -> Iterator[Mapping[str, Any]]:
    yield _named("process_name", _RUN, facts.source.name)
    yield _named("thread_name", _RUN, "run")
    yield from _spans(facts, _RUN, 0.0, facts.wall_s)
    for rank in shown_ranks(facts):
        yield _named("thread_name", rank + 1, f"rank {rank}")
        for attempt in facts.attempts:
            if rank < attempt.workers:
                yield from _spans(facts, rank + 1, attempt.start, attempt.stop)
    for mark in facts.marks:
        yield {
            "name": mark.kind,
            "ph": "i",
            # A mark of one rank is as high as its row, another as the whole process.
            "s": "p" if mark.rank is None else "t",
            "ts": 1e6 * (mark.time - facts.began),
            "pid": 0,
            "tid": _RUN if mark.rank is None else mark.rank + 1,
            "args": {"text": mark.text},
        }


def _spans(facts: Facts, row: int, start: float, stop: float) -> Iterator[Mapping[str, Any]]:
    for span in facts.spans:
        begin, end = max(start, span.start), min(stop, span.start + span.seconds)
        if end > begin:
            yield {
                "name": span.account,
                "ph": "X",
                "ts": 1e6 * (span.time + begin - span.start - facts.began),
                "dur": 1e6 * (end - begin),
                "pid": 0,
                "tid": row,
            }


def _named(what: str, row: int, name: str) -> Mapping[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
