"""Which stretch of a run is repeated, and where the two first differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from polytrain.record.attempts import AttemptOverview
from polytrain.record.entries import (
    CODE_AFTER,
    DigestsKept,
    Launched,
    MetricsReported,
    Opened,
    RunConcluded,
)
from polytrain.record.repetition import (
    ReportDifference,
    ReportedHistory,
    Stretch,
    attempts_since,
    compare,
    compare_digests,
    starting_steps,
    stretch_of,
)
from polytrain.record.reports import Reports


def attempt(
    first_step: int, num_workers: int, *, driver: int = 1, virtual: int | None = None
) -> AttemptOverview:
    return AttemptOverview(
        driver=driver,
        number=0,
        num_workers=num_workers,
        virtual_workers=virtual,
        first_step=first_step,
        checkpoint=None,
        launched=0.0,
        start_s=0.0,
    )


def stretch(start: int, end: int, *attempts: AttemptOverview) -> Stretch:
    return stretch_of(attempts, start=start, end=end, last_step=50)


def test_the_last_attempt_that_made_the_reports_says_how_many_workers() -> None:
    # The third attempt has replaced what the second one made after step 20.
    made = attempt(0, 4), attempt(30, 2), attempt(20, 3)
    assert stretch(10, 15, *made).num_workers == 4
    assert stretch(20, 25, *made).num_workers == 3
    assert stretch(40, 45, *made).num_workers == 3


def test_a_stretch_ends_where_the_number_of_workers_changes_and_says_so() -> None:
    made = attempt(0, 4), attempt(20, 4), attempt(30, 2)
    found = stretch(10, 45, *made)
    assert found.end == 30
    assert "from step 31 on the run had 2 workers" in found.shortened
    assert not stretch(10, 30, *made).shortened
    # A later attempt with 4 workers has repeated all that 2 had made.
    assert not stretch(10, 45, *made, attempt(20, 4)).shortened


def test_a_stretch_ends_where_the_run_was_resumed_with_something_else() -> None:
    """The third driver has replaced all that the second one trained."""
    made = [attempt(at, 1, driver=driver) for at, driver in ((0, 1), (20, 2), (10, 3), (30, 4))]
    changes = {2: "train_loop_config", 3: "datasets['train'] and lr"}
    found = stretch_of(made, start=0, end=45, last_step=50, changes=changes)
    assert (found.end, found.shortened) == (
        10,
        "from step 11 on the run was trained with other values of datasets['train'] and lr",
    )
    assert [each.driver for each in attempts_since(made, 15)] == [3, 4]


def test_with_virtual_workers_any_number_of_workers_makes_the_same_reports() -> None:
    made = attempt(0, 1), attempt(20, 4, virtual=4), attempt(30, 2, virtual=4)
    assert stretch(20, 45, *made).end == 45
    found = stretch(10, 45, *made)
    assert (found.end, found.shortened) == (
        20,
        "from step 21 on the run had virtual_workers=4, before None",
    )


def test_a_stretch_ends_with_the_last_report() -> None:
    found = stretch(10, 90, attempt(0, 1))
    assert (found.end, found.shortened) == (50, "the run's last report is 50")


def test_the_newest_checkpoint_before_a_step_is_tried_first() -> None:
    steps = [10, 20, 30]
    assert starting_steps(steps, 25, 30) == [20, 10]
    assert starting_steps(steps, 20, 30) == [20, 10]
    # No report follows the last one.
    assert starting_steps(steps, None, 30) == [20, 10]
    assert starting_steps(steps, 0, 30) == []


def difference(
    was: Mapping[int, Mapping[str, Any]], now: Mapping[int, Mapping[str, Any]], *ignore: str
) -> ReportDifference | None:
    before, again = Reports(), Reports()
    for kept, reports in ((before, was), (again, now)):
        for step, metrics in reports.items():
            kept.add(step, metrics)
    inside = Stretch(start=0, end=3, num_workers=1)
    return compare(before, again, inside, ignore=ignore)[1]


@pytest.mark.parametrize(
    ("was", "now"),
    [(0.1, math.nextafter(0.1, 1)), (0.0, -0.0), (1, 1.0), (math.nan, 1.0), ({"a": 1}, {"a": 2})],
)
def test_a_value_that_differs_in_one_bit_is_named(was: Any, now: Any) -> None:
    found = difference({1: {"a": 1}, 2: {"b": was}}, {1: {"a": 1}, 2: {"b": now}})
    assert found is not None
    assert (found.step, found.kind, found.name) == (2, "metric", "b")
    assert difference({2: {"b": was}}, {2: {"b": now}}, "b") is None
    assert difference({2: {"b": was}}, {2: {"b": was}}) is None


def test_a_report_or_metric_that_one_of_them_lacks_differs() -> None:
    assert str(difference({1: {}, 2: {}}, {1: {}})) == (
        "step 2: the run has a report, the replay has none"
    )
    assert str(difference({1: {}}, {1: {"a": 1}})) == "step 1: metric 'a' was None, now 1"
    # Behind the stretch.
    assert difference({1: {}}, {1: {}, 4: {}}) is None


def kept(step: int, digests: str, *names: str) -> DigestsKept:
    return DigestsKept(step=step, digests=digests, names=names)


def test_digests_after_a_restart_replace_those_it_has_undone() -> None:
    history = ReportedHistory()
    launched = Launched(attempt=1, step=2, start=None, world_size=1)
    for entry in (
        kept(1, "a" * 16 + "b" * 16, "first", "second"),
        kept(2, "c" * 16 + "d" * 16),
        kept(3, "e" * 16 + "f" * 16),
        launched,
        kept(4, "0" * 16, "third"),
    ):
        history.take(entry)
    assert history.digests == {
        1: {"first": "a" * 16, "second": "b" * 16},
        2: {"first": "c" * 16, "second": "d" * 16},
        4: {"third": "0" * 16},
    }


def test_the_first_tensor_that_differs_is_named() -> None:
    inside = Stretch(start=0, end=3, num_workers=1)
    was = {2: {"a": "1", "b": "2", "c": "3"}, 3: {"a": "1"}}
    now = {2: {"a": "1", "b": "0", "c": "0"}, 3: {"a": "1"}}
    compared, found = compare_digests(was, now, inside)
    assert (compared, str(found)) == (1, "step 2: tensor 'b' was '2', now '0'")
    # Steps without digests on one side, and those behind the stretch, don't count.
    assert compare_digests({1: {"a": "1"}, 4: {"a": "1"}}, {4: {"a": "0"}}, inside) == (0, None)


def test_a_report_that_a_survivor_made_is_not_compared() -> None:
    """Rank 0 was lost before its report of step 2, so the history has rank 1's metrics."""
    history, again = ReportedHistory(), ReportedHistory()
    for kept, loss, survivor in ((history, 0.25, 1), (again, 0.5, None)):
        for step in (1, 2, 3):
            metrics = {"loss": loss if step == 2 else 1.0}
            entry = MetricsReported(n=step - 1, step=step, metrics=metrics)
            kept.take(replace(entry, survivor=survivor) if step == 2 else entry)
    assert history.by_survivors == {2: 1}
    inside = Stretch(start=0, end=3, num_workers=2)
    found = compare(
        history.reports, again.reports, inside, ignore=(), by_survivors=history.by_survivors
    )
    assert found == (2, None)
    history.take(Launched(attempt=1, step=1, start=None, world_size=2))
    assert not history.by_survivors, "rank 0 reports it again"


def test_what_training_has_changed_in_its_process_is_no_change_of_the_code() -> None:
    history = ReportedHistory()
    history.take(Opened(token=1, anew=True, identity={"backend": "reference"}, world_size=1))
    code: Any = {"train_loop_per_worker": "a", "objects": {}, "transforms": {}}
    history.take(RunConcluded(token=1, succeeded=True, stopped=None, reason="", code=code))
    assert history.identities[1] == {"backend": "reference", CODE_AFTER: code}
