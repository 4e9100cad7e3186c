"""Which rows a tracker lacks: whatever befalls run and tracker, it has every step exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.record.journal_writer import JournalWriter

from polytrain.policy.validation import ValidationStatus
from polytrain.record.entries import (
    CheckpointCommitted,
    Entry,
    Launched,
    MetricsReported,
    ValidationEnded,
)
from polytrain.text.metrics import flat
from polytrain.trackers.rows import Position, TrackedRows
from polytrain.trackers.tracker import Row

EVENTS = st.lists(
    st.sampled_from(("report", "report", "report", "commit", "validate", "restart", "driver")),
    max_size=40,
)


@dataclass
class Store:
    """A tracker's store. It refuses a step that it has."""

    rows: dict[int, Row] = field(default_factory=dict)

    def deliver(self, missing: TrackedRows) -> None:
        while not (changes := missing.next()).is_empty:
            if changes.rewind is not None:
                self.rows = {s: row for s, row in self.rows.items() if s <= changes.rewind}
            for row in changes.rows:
                assert row.step > max(self.rows, default=0)
                self.rows[row.step] = row
            for late in changes.amendments:
                old = self.rows[late.step]
                metrics = {**old.metrics, **late.metrics}
                self.rows[late.step] = Row(step=old.step, time=old.time, metrics=metrics)
            missing.done(changes)

    def metrics(self) -> list[Mapping[str, Any]]:
        return [self.rows[step].metrics for step in sorted(self.rows)]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[JournalWriter]:
    with JournalWriter(tmp_path) as writer:
        yield writer


@pytest.mark.parametrize("can_rewind", [True, False])
@settings(max_examples=30)
@given(events=EVENTS, data=st.data())
def test_a_store_ends_up_with_the_history(can_rewind: bool, events: list[str], data: Any) -> None:
    """Sent from the journal, by processes that come and go."""
    with TemporaryDirectory() as directory, JournalWriter(Path(directory)) as driver:
        store, position = Store(), Position(since=1)
        for event in events:
            driver.do(event)
            if data.draw(st.booleans()):
                missing = TrackedRows(position, can_rewind=can_rewind)
                for entry in driver.entries():
                    missing.take(entry)
                store.deliver(missing)
                position = missing.position
        driver.finish()
        missing = TrackedRows(position, can_rewind=can_rewind)
        for entry in driver.entries():
            missing.take(entry)
        store.deliver(missing)
        assert store.metrics() == [flat(metrics) for metrics in driver.history().reports]
        # Nothing is left to do, for anybody.
        again = TrackedRows(missing.position, can_rewind=can_rewind)
        for entry in driver.entries():
            again.take(entry)
        assert again.next().is_empty


@pytest.mark.parametrize("can_rewind", [True, False])
@settings(max_examples=30)
@given(events=EVENTS, data=st.data())
def test_what_is_sent_live_is_what_is_sent_later(
    can_rewind: bool, events: list[str], data: Any
) -> None:
    """One tracker lives as long as the driver; the next driver continues where it was."""
    with TemporaryDirectory() as directory, JournalWriter(Path(directory)) as driver:
        store, position = Store(), Position(since=1)
        live: TrackedRows | None = None
        token = 0
        for event in [*events, "finish"]:
            driver.finish() if event == "finish" else driver.do(event)
            if driver.token != token:
                token = driver.token
                live = TrackedRows(position, can_rewind=can_rewind)
                for entry in driver.entries():
                    if entry.token < token:
                        live.take(entry)
            assert live is not None
            for taken in driver.taken:
                live.take(taken)
            driver.taken.clear()
            if data.draw(st.booleans()) or event == "finish":
                store.deliver(live)
                position = live.position
        assert store.metrics() == [flat(metrics) for metrics in driver.history().reports]


def test_an_undone_step_is_not_sent_where_it_would_stay(driver: JournalWriter) -> None:
    missing = TrackedRows(Position(since=1), can_rewind=False)
    for event in ("report", "report", "commit", "report"):
        driver.do(event)
    for entry in driver.entries():
        missing.take(entry)
    assert [row.step for row in missing.next().rows] == [1, 2]


def test_a_row_has_the_load_since_the_row_before(driver: JournalWriter) -> None:
    store = Store()
    missing = TrackedRows(Position(since=1), can_rewind=True, has_loads=True)
    for event in ("report", "load", "report", "report", "load", "report", "restart", "report"):
        driver.do(event)
    for entry in driver.entries():
        missing.take(entry)
    store.deliver(missing)
    load = {
        "system/rank_0_busy_percentage": 50,
        "system/rank_1_busy_percentage": 25,
        "system/rank_0_cpu_utilization_percentage": 250,
        "system/rank_1_cpu_utilization_percentage": 25,
        "system/rank_0_memory_megabytes": 2,
        "system/rank_1_memory_megabytes": 1,
        "system/rank_1_gpu_0_utilization_percentage": 75,
        "system/rank_1_gpu_0_memory_usage_megabytes": 40_000,
        "system/rank_1_gpu_1_memory_usage_megabytes": 7,
    }
    shown = [
        {name: value for name, value in row.items() if name.startswith("system/")}
        for row in store.metrics()
    ]
    assert shown == [{}]
    for event in ("load", "report", "report"):
        driver.do(event)
    for entry in driver.taken[-3:]:
        missing.take(entry)
    store.deliver(missing)
    assert [dict(row).items() >= load.items() for row in store.metrics()] == [False, True, False]


def test_all_rows_are_sent_on_request_and_not_again(driver: JournalWriter) -> None:
    store = Store()
    for event in ("report", "report"):
        driver.do(event)
    missing = TrackedRows(Position(since=1), can_rewind=False, all_rows=True)
    for entry in driver.entries():
        missing.take(entry)
    store.deliver(missing)
    before = dict(store.rows)
    for event in ("driver", "report", "report", "report"):
        driver.do(event)
    driver.finish()
    missing = TrackedRows(missing.position, can_rewind=False)
    for entry in driver.entries():
        missing.take(entry)
    store.deliver(missing)
    assert sorted(store.rows) == [1, 2, 3]
    assert {step: store.rows[step] for step in before} == before


def committed(step: int, good_step: int | None) -> CheckpointCommitted:
    return CheckpointCommitted(checkpoint=f"c{step}", step=step, good_step=good_step, token=1)


def launched(step: int) -> Launched:
    return Launched(attempt=0, step=step, start=None, world_size=2, token=1)


def take(missing: TrackedRows, *entries: Entry) -> None:
    for entry in entries:
        # Reports of a driver are counted.
        is_report = isinstance(entry, MetricsReported)
        missing.take(replace(entry, n=missing.known) if is_report else entry)


def reported(step: int, value: float) -> MetricsReported:
    return MetricsReported(rank=0, step=step, metrics={"value": value}, token=1)


def test_a_rank_that_has_not_reported_a_step_may_undo_it() -> None:
    """Rank 0 commits steps 4 and 5 when rank 1, whose report of 4 is bad, has reported 3."""
    missing, store = TrackedRows(Position(since=1), can_rewind=False), Store()
    take(missing, launched(0), *(reported(step, step) for step in (1, 2, 3)), committed(3, 3))
    take(missing, reported(4, 40), committed(4, 3), reported(5, 50), committed(5, 3))
    store.deliver(missing)
    assert 4 not in store.rows, "rank 1 hasn't reported it"
    take(missing, launched(3), reported(4, 41), reported(5, 51), committed(5, 6))
    store.deliver(missing)
    assert store.metrics() == [{"value": value} for value in (1, 2, 3, 41, 51)]


def test_a_checkpoint_that_attempts_may_blame_covers_nothing() -> None:
    """Two attempts diverge by their first report after the checkpoint of step 2."""
    missing, store = TrackedRows(Position(since=1), can_rewind=False), Store()
    take(missing, launched(0), reported(1, 1), committed(1, 1), reported(2, 20), committed(2, 2))
    for step in (2, 2, 1):
        take(missing, launched(step))
        store.deliver(missing)
    take(missing, reported(2, 21), reported(3, 31), committed(2, 3))
    store.deliver(missing)
    assert store.metrics() == [{"value": 1}, {"value": 21}]


def test_the_rows_before_a_restart_are_sent_after_a_good_report() -> None:
    missing, store = TrackedRows(Position(since=1), can_rewind=False), Store()
    take(missing, launched(0), reported(1, 1), committed(1, 1))
    take(missing, launched(1), reported(2, 2), committed(2, 2))
    store.deliver(missing)
    assert store.metrics() == [{"value": 1}]


def validated(step: int, **metrics: float) -> ValidationEnded:
    return ValidationEnded(
        checkpoint=f"c{step}",
        step=step,
        status=ValidationStatus.VALIDATED,
        metrics=metrics,
        reason="",
        token=1,
    )


def test_a_row_takes_one_validation_with_it_where_earlier_rows_stay_as_they_are() -> None:
    """Otherwise the next one would replace it."""

    def taken() -> list[tuple[int, int | None]]:
        changes = missing.next()
        assert not changes.amendments
        missing.done(changes)
        return [(row.step, row.validation and row.validation.step) for row in changes.rows]

    missing = TrackedRows(Position(since=1), can_rewind=False, can_amend=False)
    take(missing, launched(0), *(reported(step, step) for step in (1, 2, 3)), committed(2, None))
    take(missing, validated(2, accuracy=0.5), validated(1, accuracy=0.25))
    assert taken() == [(1, None), (2, 2)]
    # The process that is here dies; what no row has taken is left.
    journal = [launched(0), *(reported(step, step) for step in (1, 2, 3)), committed(2, None)]
    journal += [validated(2, accuracy=0.5), validated(1, accuracy=0.25)]
    missing = TrackedRows(missing.position, can_rewind=False, can_amend=False)
    take(missing, *journal, committed(3, None), validated(3, value=9))
    assert taken() == [(3, 1)]
    assert taken() == []
    take(missing, reported(4, 4), committed(4, None))
    # The row has a metric of this name itself.
    assert taken() == [(4, None)]
    changes = missing.next(is_over=True)
    assert [dict(row.metrics) for row in changes.amendments] == [{"value": 9}]
    missing.done(changes)
    assert missing.next(is_over=True).is_empty
    assert missing.position.amendments == 3
