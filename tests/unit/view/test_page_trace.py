"""A run's timeline for Chrome's tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.record.recorded import RUN, page_of

from polytrain.view.page.chrome_trace import trace_of


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(json.dumps(trace_of(page_of(RUN))))["traceEvents"]
    return events


def test_the_spans_of_the_run_are_its_ledger(events: list[dict[str, Any]]) -> None:
    seconds = dict.fromkeys(page_of(RUN).seconds, 0.0)
    for event in events:
        if event["ph"] == "X" and event["tid"] == 0:
            seconds[event["name"]] += event["dur"] / 1e6
    assert seconds == pytest.approx(page_of(RUN).seconds)


def test_times_are_those_of_the_day_with_the_pause_between_drivers(
    events: list[dict[str, Any]],
) -> None:
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(104e6)
    starts = [event["ts"] / 1e6 for event in events if event["ph"] == "X" and event["tid"] == 3]
    # Rank 2 was there in the first attempt only.
    assert min(starts) == 1
    assert max(starts) < 6


def test_every_row_is_named_and_marks_are_in_their_rank(events: list[dict[str, Any]]) -> None:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "run", 1: "rank 0", 2: "rank 1", 3: "rank 2"}
    marks = {event["name"]: event["tid"] for event in events if event["ph"] == "i"}
    assert (marks["failure"], marks["straggler"], marks["checkpoint"]) == (2, 3, 0)
