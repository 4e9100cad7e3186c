"""A line of a journal and its entry say the same; what a newer version adds is left out."""

from __future__ import annotations

import json
import pickle

import pytest
from tests.unit.record.lines import entry_of
from tests.unit.record.recorded import LOST, RUN, Line, line

from polytrain.errors import Failure, FailureKind
from polytrain.record.entries import (
    AttemptEnded,
    MetricsReported,
    Transitioned,
    UnknownEntry,
    encoded,
)
from polytrain.text import strict_json


@pytest.mark.parametrize("written", RUN, ids=[each["event"] for each in RUN])
def test_what_is_read_is_what_was_written(written: Line) -> None:
    entry = entry_of(written)
    assert entry_of(json.loads(strict_json.dumps(encoded(entry)))) == entry


def test_fields_and_events_of_a_newer_version_are_left_out() -> None:
    report = line(1, "Reported", step=1, metrics={}, later="x")
    assert entry_of(report) == MetricsReported(time=1, token=1, step=1, metrics={})
    assert entry_of(line(1, "Later", field=1)) == UnknownEntry(time=1, token=1, event="Later")
    moved = entry_of(line(1, "Later", phase="Training", attempt=2, reason="r"))
    assert moved == Transitioned(
        time=1, token=1, cause="Later", phase="Training", attempt=2, reason="r"
    )


def test_a_kind_of_failure_of_a_newer_version_is_unknown() -> None:
    failure = {**LOST, "kind": "COSMIC_RAY", "later": 1}
    entry = entry_of(line(1, "AttemptEnded", attempt=0, failure=failure, reason="r"))
    assert isinstance(entry, AttemptEnded)
    assert entry.failure is not None
    assert (entry.failure.kind, entry.failure.rank) == (FailureKind.UNKNOWN, 1)
    assert str(entry.failure) == "rank 1 on b: killed by SIGKILL"


def test_nothing_that_is_pickled_is_stored_or_read() -> None:
    failure = Failure(
        kind=FailureKind.USER_ERROR, rank=0, message="m", error=pickle.dumps(ValueError())
    )
    ended = AttemptEnded(attempt=0, failure=failure, reason="r", failures=(failure,))
    written = json.loads(strict_json.dumps(encoded(ended)))
    assert "failures" not in written
    assert "error" not in written["failure"]
    read = entry_of({**written, "failures": [1], "failure": {**written["failure"], "error": "x"}})
    assert isinstance(read, AttemptEnded)
    assert read.failures == ()
    assert read.failure is not None
    assert read.failure.error is None
