"""Which reports show that training diverges, and what is left out afterwards."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain import FailureConfig, Rollback
from polytrain.policy.divergence import (
    DataPlace,
    Divergences,
    DivergenceWatch,
    divergence_rule,
    left_out,
)

STEADY = [{"loss": 1.0 + n % 3 / 10} for n in range(20)]


def wrong(
    divergence: Any, metrics: dict[str, Any], before: list[dict[str, Any]] | None = None
) -> str | None:
    """What a rule finds wrong with a report."""
    rule = divergence_rule(FailureConfig(on_divergence="fail", divergence=divergence))
    assert rule is not None
    return rule.wrong(metrics, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_metric_that_is_no_finite_number_is_bad(value: float) -> None:
    assert wrong(None, {"step": 1, "note": "nan", "valid": {"rmse": [0.5, value]}}) == (
        f"valid/rmse is {value}"
    )
    assert wrong(None, {"loss": 1e300, "best": None, "is_last": True}) is None


def test_only_named_metrics_are_watched() -> None:
    report = {"auc": math.nan, "loss": 0.5, "train": {"rmse": math.nan}}
    assert wrong("loss", report) is None
    assert wrong(["loss", "train/rmse"], report) == "train/rmse is nan"
    assert wrong("a name that no report has", report) is None


def test_a_spike_is_a_multiple_of_the_usual_value() -> None:
    spikes = {"loss": 4}
    assert wrong(spikes, {"loss": 4.3}, STEADY) is None
    found = wrong(spikes, {"loss": 4.5}, STEADY)
    assert found == "loss is 4.5, more than 4 times 1.1, the median of its last 20 values"
    assert wrong(spikes, {"loss": math.nan}, None) == "loss is nan"
    # Too few values, or none that is positive, say nothing about what is usual.
    assert wrong(spikes, {"loss": 100.0}, STEADY[:9]) is None
    assert wrong(spikes, {"loss": 100.0}, [{"loss": -1.0}] * 20) is None


def test_a_function_decides_by_the_last_reports() -> None:
    seen: list[list[Any]] = []

    def grows(history: list[Any]) -> bool:
        seen.append(history)
        return np.bool_(history[-1]["loss"] > 2)  # type: ignore[return-value]

    assert wrong(grows, {"loss": 3.0}, STEADY[:1]) is not None
    assert wrong(grows, {"loss": math.nan}, []) is None
    assert seen[0] == [STEADY[0], {"loss": 3.0}]
    with pytest.raises(TypeError, match=r"lambda.* has to return True or False, and returned 'no'"):
        wrong(lambda history: "no", {"loss": 3.0}, [])
    with pytest.raises(RuntimeError, match=r"^FailureConfig\.divergence: .*<lambda> has called"):
        wrong(lambda history: sys.exit(0), {"loss": 3.0}, [])


def test_metrics_that_a_function_changes_are_its_own() -> None:
    """It is asked about the same reports again, and the last one is stored."""
    reports: list[dict[str, Any]] = [{"loss": 1.0}, {"loss": 3.0}]

    def falls(history: list[Any]) -> bool:
        return bool(history.pop().pop("loss") < history.pop().pop("loss"))

    assert wrong(falls, reports[1], reports[:1]) is None
    assert reports == [{"loss": 1.0}, {"loss": 3.0}]


def test_nothing_is_watched_unless_it_is_asked_for() -> None:
    assert divergence_rule(FailureConfig()) is None


def place(epoch: int, start: int, *, rows: int = 100, skips: bool = True) -> DataPlace:
    return DataPlace(place=(epoch, start), rows=rows, skips=skips)


def watch(rank: int = 0, **rule: Any) -> DivergenceWatch:
    found = divergence_rule(FailureConfig(on_divergence="rollback", **rule))
    assert found is not None
    return DivergenceWatch(
        found, rank=rank, step=4, places={"train": place(0, 40)}, before=STEADY, skips=True
    )


def look(at: DivergenceWatch, step: int, loss: float, start: int) -> tuple[Rollback, str] | None:
    return at.look(attempt=1, step=step, metrics={"loss": loss}, places={"train": place(0, start)})


def test_what_was_read_since_the_last_good_report_is_left_out() -> None:
    mine = watch()
    assert look(mine, 5, 1.0, 50) is None
    found = look(mine, 6, math.nan, 60)
    assert found is not None
    rollback, problem = found
    assert problem == ""
    assert (rollback.step, rollback.good_step) == (6, 5)
    assert rollback.skipped == {"train": ((0, 50, 60),)}
    assert rollback.without == "positions 50 to 59 of epoch 0 of 'train'"
    # The first report is compared with the checkpoint that the attempt starts from.
    first = look(watch(), 5, math.nan, 50)
    assert first is not None
    assert (first[0].good_step, first[0].skipped) == (4, {"train": ((0, 40, 50),)})


def test_nothing_is_left_out_where_the_bad_batch_may_be_an_earlier_one() -> None:
    """No report has shown a survivor's state to be good."""
    rule = divergence_rule(FailureConfig(on_divergence="rollback"))
    assert rule is not None
    places = {"train": place(0, 40)}
    mine = DivergenceWatch(
        rule, rank=0, step=4, places=places, before=STEADY, skips=True, starts_unseen=True
    )
    first = look(mine, 5, math.nan, 50)
    assert first is not None
    assert (first[0].good_step, first[0].skipped, first[1]) == (4, {}, "")
    # A good report shows it.
    assert look(mine, 5, 1.0, 50) is None
    later = look(mine, 6, math.nan, 60)
    assert later is not None
    assert later[0].skipped == {"train": ((0, 50, 60),)}


def test_a_spike_is_found_on_rank_0_by_the_reports_before_the_restart() -> None:
    assert look(watch(divergence={"loss": 4}), 5, 9.0, 50) is not None
    assert look(watch(rank=1, divergence={"loss": 4}), 5, 9.0, 50) is None
    assert look(watch(rank=1, divergence={"loss": 4}), 5, math.inf, 50) is not None


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ((0, 90), (1, 10), ((0, 90, 100), (1, 0, 10))),
        ((0, 100), (1, 10), ((1, 0, 10),)),
        ((0, 90), (1, 0), ((0, 90, 100),)),
        ((0, 90), (2, 10), ((0, 90, 100), (1, 0, 100), (2, 0, 10))),
    ],
    ids=["over the end", "from the next epoch's start", "to the end", "over what was left out"],
)
def test_the_place_may_be_in_a_later_epoch(
    good: tuple[int, int], bad: tuple[int, int], expected: Any
) -> None:
    before = {"train": [(1, 0, 90)]}
    found = left_out({"train": place(*good)}, {"train": place(*bad)}, before)
    assert found == ({"train": expected}, "")


def test_what_was_only_looked_at_is_not_blamed() -> None:
    """Two looks at the first batch; then a report of the second epoch's first, or of none."""
    start, now = {"train": place(0, 0)}, place(2, 10)
    looked = replace(now, since=(2, 0))
    assert left_out(start, {"train": looked}) == ({"train": ((2, 0, 10),)}, "")
    for unclear in (now, replace(looked, place=(2, 0))):
        assert "all of an epoch" in left_out(start, {"train": unclear})[1]


@pytest.mark.parametrize(
    ("skipped", "read"),
    [
        (((0, 20, 60), (0, 20, 80), (0, 90, 110), (1, 10, 20)), 40),
        (((0, 0, 10), (0, 20, 30), (1, 0, 5)), 85),
        (((1, 5, 10), (1, 10, 20)), 105),
    ],
)
def test_what_was_left_out_before_was_not_read(skipped: Any, read: int) -> None:
    found, problem = left_out({"train": place(0, 0)}, {"train": place(1, 10)}, {"train": skipped})
    assert ("all of an epoch" in problem, not found) == (read >= 100, read >= 100)


def test_data_that_is_read_to_validate_comes_again() -> None:
    good = {"train": place(0, 50), "valid": place(0, 0)}
    assert left_out(good, {"train": place(0, 60), "valid": place(1, 0)})[0] == {
        "train": ((0, 50, 60),)
    }
    loaders = {"data loader 0": place(0, 50), "data loader 1": place(0, 0)}
    assert left_out(loaders, {"data loader 0": place(0, 60), "data loader 1": place(1, 0)})[0] == {
        "data loader 0": ((0, 50, 60),)
    }


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"train": place(0, 50)}, "no data set that polytrain reads was read"),
        ({}, "no data set that polytrain reads was read"),
        ({"train": place(1, 50)}, "all of an epoch of 'train' was read"),
        ({"train": place(0, 60, skips=False)}, "batches of 'train' can't be left out"),
    ],
)
def test_it_is_said_why_nothing_can_be_left_out(bad: dict[str, DataPlace], problem: str) -> None:
    skipped, found = left_out({"train": place(0, 50)}, bad)
    assert (skipped, problem in found) == ({}, True)
    assert "on_rollback" in found


def test_where_only_an_epoch_has_ended_nothing_can_be_left_out() -> None:
    """As in a report after the epoch, of a metric of the validation."""
    skipped, problem = left_out({"train": place(0, 100)}, {"train": place(1, 0)})
    assert skipped == {}
    assert "no data set that polytrain reads was read" in problem
    loaders = {"train": place(0, 100), "valid": place(0, 10)}
    assert left_out(loaders, {"train": place(1, 0), "valid": place(0, 20)})[0] == {
        "valid": ((0, 10, 20),)
    }


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_loader_that_is_opened_in_the_middle_of_an_epoch_begins_there(epoch: int) -> None:
    """The first batch after a restart is bad; then that of a loader which is opened later."""
    rule = divergence_rule(FailureConfig(on_divergence="rollback"))
    assert rule is not None
    mine = DivergenceWatch(rule, rank=0, step=4, places={}, before=(), skips=True)
    for n, name in enumerate(("a", "b")):
        mine.opened(name, place(epoch, 14))
        # What is opened again goes on where it was.
        mine.opened(name, place(epoch, 16))
        metrics = {"loss": math.nan}
        found = mine.look(attempt=1, step=5 + n, metrics=metrics, places={name: place(epoch, 16)})
        assert found is not None
        assert (found[0].skipped, found[1]) == ({name: ((epoch, 14, 16),)}, "")


def test_what_a_rollback_could_not_leave_out_is_known_with_the_first_report() -> None:
    unread, whole = watch(), watch()
    assert look(unread, 5, 1.0, 40) is None
    assert "no data set that polytrain reads was read" in unread.notice
    whole.keeps_all = "steps are counted elsewhere"
    found = look(whole, 5, math.nan, 50)
    assert found is not None
    assert (found[0].skipped, found[1]) == ({}, whole.notice)
    assert whole.notice.startswith("steps are counted elsewhere. FailureConfig(on_rollback=")
    right = watch()
    look(right, 5, 1.0, 50)
    assert right.notice == ""


ROLLBACK = Rollback(attempt=1, rank=0, step=6, good_step=5, reason="loss is nan")


def found_by(divergences: Divergences, *found: Rollback, start: tuple[int, str | None]) -> None:
    divergences.launched(*start)
    for each in found:
        divergences.take(1, each)


@given(step=st.integers(0, 10), attempt=st.integers(0, 2))
def test_checkpoints_after_the_last_good_report_are_bad(step: int, attempt: int) -> None:
    divergences = Divergences()
    # Rank 1 has found it a step earlier.
    others = dataclasses.replace(ROLLBACK, rank=1, step=5, good_step=4)
    found_by(divergences, ROLLBACK, others, start=(2, "/run/a"))
    assert divergences.is_bad((1, attempt), step, "b") == (attempt == 1 and step > 4)
    [rollback] = divergences.rollbacks
    assert (rollback.number, rollback.rank, rollback.good_step) == (1, 1, 4)


def test_a_checkpoint_after_which_all_diverges_is_bad_itself() -> None:
    divergences = Divergences()
    for attempt, good_step in ((1, 5), (2, 6), (3, 5)):
        rollback = dataclasses.replace(ROLLBACK, attempt=attempt, good_step=good_step, step=7)
        assert not divergences.is_bad((1, 0), 5, "a")
        found_by(divergences, rollback, start=(5, f"/moved/{attempt}/a"))
    assert divergences.is_bad((1, 0), 5, "a")
    assert not divergences.is_bad((1, 0), 4, "b")


def test_bad_batches_that_follow_each_other_are_no_fault_of_the_checkpoint() -> None:
    """Each attempt leaves out another one; a third says that it isn't the batches."""
    divergences = Divergences()
    for attempt in range(3):
        assert not divergences.is_bad((1, 9), 5, "a")
        skipped = {"train": ((0, attempt, attempt + 1),)}
        rollback = dataclasses.replace(ROLLBACK, attempt=attempt, skipped=skipped)
        found_by(divergences, rollback, start=(5, "/run/a"))
    assert divergences.is_bad((1, 9), 5, "a")


def test_a_state_that_no_report_has_shown_to_be_good_is_bad_at_once() -> None:
    divergences = Divergences()
    rollback = dataclasses.replace(ROLLBACK, attempt=1, good_step=5, step=6)
    found_by(divergences, rollback, start=(5, "/run/a"))
    assert divergences.is_bad((1, 0), 5, "a", is_rescue=True)
    assert not divergences.is_bad((1, 0), 5, "a")


def test_what_is_left_out_adds_up() -> None:
    divergences = Divergences()
    for attempt, first in ((0, 10), (1, 20)):
        skipped = {"train": ((0, first, first + 10),)}
        rollback = dataclasses.replace(ROLLBACK, attempt=attempt, skipped=skipped)
        found_by(divergences, rollback, start=(0, None))
    assert divergences.skipped == {"train": ((0, 10, 20), (0, 20, 30))}
    assert [each.number for each in divergences.rollbacks] == [1, 2]


def test_a_discarded_state_of_a_survivor_is_no_rollback() -> None:
    """The next attempt finds the bad batch again, from a checkpoint that is known to be good."""
    found = Divergences()
    bad = Rollback(attempt=1, rank=0, step=5, good_step=4, reason="loss is nan")
    found.launched(4, "runs/a/checkpoint_4")
    found.take(1, bad, is_rollback=False)
    assert found.rollbacks == ()
    assert found.is_bad((1, 0), 4, "checkpoint_4", is_rescue=True)
    skipped = {"train": ((0, 40, 50),)}
    found.take(1, replace(bad, attempt=2, skipped=skipped))
    assert found.rollbacks == (replace(bad, attempt=2, number=1, skipped=skipped),)
