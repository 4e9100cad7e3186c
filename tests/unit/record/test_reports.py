"""Columns of reports behave as the tuple of dicts that they stand for."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sweeps import examples
from tests.unit.record.lines import entry_of

from polytrain.record.ledger import Ledger
from polytrain.record.reports import Reports
from polytrain.text import strict_json

VALUES = st.one_of(
    st.floats(allow_nan=False),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=3),
    st.booleans(),
    st.none(),
    st.lists(st.floats(allow_nan=False), max_size=2),
)
METRICS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), VALUES, max_size=4)
REPORTS = st.lists(st.tuples(st.integers(1, 3), METRICS), max_size=12)
"""How far the step is ahead of the last one, and the metrics."""

Rows = list[tuple[int, dict[str, Any]]]


def rows_of(drawn: Rows, *, after: int = 0) -> Rows:
    step, found = after, []
    for ahead, metrics in drawn:
        step += ahead
        found.append((step, metrics))
    return found


def reports_of(rows: Rows) -> Reports:
    reports = Reports()
    for step, metrics in rows:
        reports.add(step, metrics)
    return reports


def assert_same(reports: Reports, rows: Rows) -> None:
    metrics = tuple(metrics for _, metrics in rows)
    assert repr(sorted_names(reports)) == repr(sorted_names(metrics))
    assert reports == metrics
    assert list(reports.since(0)) == rows
    assert reports.steps().tolist() == [step for step, _ in rows]


def sorted_names(metrics: Any) -> list[dict[str, Any]]:
    """`1`, `1.0` and `True` are equal, and shall be told apart."""
    return [dict(sorted(each.items())) for each in metrics]


@given(drawn=REPORTS, start=st.integers(-13, 13), stop=st.integers(-13, 13))
def test_reports_are_a_sequence_of_what_was_added(drawn: Rows, start: int, stop: int) -> None:
    found = rows_of(drawn)
    reports, metrics = reports_of(found), tuple(metrics for _, metrics in found)
    assert_same(reports, found)
    assert reports[start:stop] == metrics[start:stop]
    assert reports[start:stop:-2] == metrics[start:stop:-2]
    assert [reports[row] for row in range(-len(found), len(found))] == [*metrics, *metrics]
    assert list(reports.since(len(found) // 2)) == found[len(found) // 2 :]
    assert reports + metrics == metrics + metrics
    assert_same(pickle.loads(pickle.dumps(reports)), found)
    with pytest.raises(IndexError):
        reports[len(found)]


@pytest.mark.sweep
@settings(max_examples=examples(100, in_test=30))
@given(drawn=REPORTS)
def test_reports_survive_being_written(drawn: Rows) -> None:
    found = rows_of(drawn)
    line = strict_json.dumps(reports_of(found).to_json())
    assert_same(Reports.from_json(strict_json.loads(line)), found)


@given(first=REPORTS, second=REPORTS, start=st.integers(0, 3))
def test_reports_are_joined(first: Rows, second: Rows, start: int) -> None:
    found = rows_of(first)
    more = rows_of(second, after=found[-1][0] if found else 0)
    reports = reports_of(found)
    reports.extend(reports_of(more), start=start)
    assert_same(reports, found + more[start:])


@given(first=REPORTS, second=REPORTS, step=st.integers(0, 20))
@example(first=[(1, {"a": 1.0}), (1, {}), (1, {"a": 2.0})], second=[(1, {"a": 3.0})], step=2)
def test_reports_after_a_step_are_dropped(first: Rows, second: Rows, step: int) -> None:
    """And others come in their place."""
    found = rows_of(first)
    reports = reports_of(found)
    reports.drop_after(step)
    kept = [each for each in found if each[0] <= step]
    assert_same(reports, kept)
    more = rows_of(second, after=step)
    for each in more:
        reports.add(*each)
    assert_same(reports, kept + more)


ENTRIES = st.lists(
    st.tuples(
        st.floats(-1, 5),  # seconds since the last one: clocks may be set back
        st.integers(0, 2),  # steps
        st.sampled_from([0.0, 0.0, 0.5, 3.0]),  # of stall
        st.sampled_from([0.0, 0.0, 0.25]),  # of copies
    ),
    max_size=20,
)


@given(drawn=ENTRIES, reached=st.integers(0, 12), start=st.integers(0, 3), replays=st.booleans())
def test_the_time_of_many_reports_is_that_of_each(
    drawn: list[tuple[float, int, float, float]], reached: int, start: int, replays: bool
) -> None:
    now, step, stalled_s, copied_s, entries = 1000.0, 0, 0.0, 0.0, []
    for passed, ahead, stall, copy in drawn:
        now, step, stalled_s = now + passed, step + ahead, stalled_s + stall
        copied_s += copy
        measured = {"stalled_s": stalled_s, "copied_s": copied_s}
        entries.append({"event": "Reported", "time": now, "step": step, **measured})
    ledgers = []
    for _ in range(2):
        ledger = Ledger()
        training = {"event": "Joined", "phase": "Training", "attempt": 0, "time": 990.0}
        ledger.take(entry_of({"event": "Opened", "time": 980.0}))
        for reported in (reached, 0)[: 1 + replays]:
            ledger.take(entry_of({"event": "Launched", "time": 985.0, "step": 0, "world_size": 1}))
            ledger.take(entry_of({**training, "attempt": reported}))
            ledger.take(entry_of(training))
            ledger.take(entry_of({"event": "Reported", "time": 995.0, "step": reported}))
        ledgers.append(ledger)
    one_by_one, at_once = ledgers
    for entry in entries:
        one_by_one.take(entry_of(entry))
    for entry in entries[:start]:
        at_once.take(entry_of(entry))
    stalls, copies = (
        {
            row: entry[name]
            for row, (before, entry) in enumerate(
                zip([{name: 0.0}, *entries], entries, strict=False)
            )
            if entry[name] != before[name]
        }
        for name in ("stalled_s", "copied_s")
    )
    steps = np.array([entry["step"] for entry in entries], dtype=np.int64)
    times = [entry["time"] for entry in entries]
    at_once.take_reports(times, steps, stalls, copies, start=start)
    assert at_once.seconds == one_by_one.seconds
    assert at_once.lost_steps == one_by_one.lost_steps


@pytest.mark.parametrize("seed", range(40))
def test_the_time_of_many_reports_is_rounded_as_that_of_each(seed: int) -> None:
    # A stall isn't a multiple of what the numbers of a clock differ by.
    stall_s = 0.01 * seed
    times = 1.8e9 + np.cumsum(np.random.default_rng(seed).random(1000))
    one_by_one, at_once = Ledger(), Ledger()
    for ledger in (one_by_one, at_once):
        training = {"event": "Joined", "phase": "Training", "attempt": 0, "time": 1.8e9 - 1}
        ledger.take(entry_of({"event": "Opened", "time": 1.8e9 - 2}))
        ledger.take(entry_of({**training, "event": "AgentsPlaced", "phase": "Gathering"}))
        ledger.take(entry_of({"event": "Launched", "time": 1.8e9 - 1}))
        ledger.take(entry_of(training))
        ledger.take(entry_of({"event": "Reported", "time": 1.8e9, "step": 0, "stalled_s": stall_s}))
    for step, time in enumerate(times.tolist()):
        one_by_one.take(entry_of({"event": "Reported", "time": time, "step": step}))
    at_once.take_reports(times.tolist(), np.arange(1000), {}, {})
    assert one_by_one.seconds["checkpoint_stall"] == stall_s
    assert at_once.seconds == one_by_one.seconds


def test_a_json_reader_finds_numbers_that_are_not_finite() -> None:
    entry = {"a": float("nan"), "b": [1, float("inf"), {"2": float("-inf")}], "c": None}
    text = strict_json.dumps(entry)
    assert json.loads(text) == {
        "a": None,
        "b": [1, None, {"2": None}],
        "c": None,
        "not_finite": {"nan": [["a"]], "inf": [["b", 1]], "-inf": [["b", 2, "2"]]},
    }
    assert repr(strict_json.loads(text)) == repr(entry)


@pytest.mark.parametrize("places", ['{"nan": [["b"]]}', '{"x": [["a"]]}', "3", '{"nan": [[]]}'])
def test_places_that_are_not_there_are_no_json(places: str) -> None:
    with pytest.raises(ValueError, match="not_finite"):
        strict_json.loads(f'{{"a": [1], "not_finite": {places}}}')
