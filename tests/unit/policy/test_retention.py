"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.config.configs import CheckpointConfig
from polytrain.policy.retention import expendable, missing_score, ranked

Order = Literal["max", "min"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as far as retention cares."""

    number: int
    metrics: Mapping[str, Any]


def saved(*scores: Any) -> list[Saved]:
    return [Saved(number, {"score": score}) for number, score in enumerate(scores)]


def by_score(order: Order = "max", *, keep: int | None = None) -> CheckpointConfig:
    return CheckpointConfig(
        num_to_keep=keep, checkpoint_score_attribute="score", checkpoint_score_order=order
    )


def numbers(checkpoints: list[Saved]) -> list[int]:
    return [checkpoint.number for checkpoint in checkpoints]


def test_without_an_attribute_the_newer_is_better() -> None:
    assert numbers(ranked(saved(3, 1, 2), CheckpointConfig())) == [2, 1, 0]


@pytest.mark.parametrize(("order", "expected"), [("max", [2, 0, 1]), ("min", [1, 0, 2])])
def test_the_order_is_the_users(order: Order, expected: list[int]) -> None:
    assert numbers(ranked(saved(2.0, 1, 3.5), by_score(order))) == expected


@pytest.mark.parametrize("order", ["max", "min"])
@pytest.mark.parametrize("bad", [math.nan, None, "high", {"inner": 1}, [1.0]])
def test_what_is_no_number_ranks_worst(order: Order, bad: Any) -> None:
    assert numbers(ranked(saved(bad, -1e300, bad, 1e300), by_score(order)))[2:] == [2, 0]


@pytest.mark.parametrize("order", ["max", "min"])
def test_a_missing_metric_ranks_worst(order: Order) -> None:
    checkpoints = [Saved(0, {"score": 5}), Saved(1, {"other": 9}), Saved(2, {})]
    assert numbers(ranked(checkpoints, by_score(order))) == [0, 2, 1]


@pytest.mark.parametrize("order", ["max", "min"])
def test_of_equals_the_newer_is_better(order: Order) -> None:
    assert numbers(ranked(saved(1, 1, 1), by_score(order))) == [2, 1, 0]
    assert numbers(expendable(saved(1, 1, 1), by_score(order, keep=1))) == [1, 0]


def test_a_nested_metric_is_found_by_its_path() -> None:
    config = CheckpointConfig(checkpoint_score_attribute="valid/auc")
    checkpoints = [Saved(0, {"valid": {"auc": 0.5}}), Saved(1, {"valid": {"auc": 0.9}})]
    checkpoints += [Saved(2, {"valid": 1.0}), Saved(3, {"valid": {}})]
    assert numbers(ranked(checkpoints, config)) == [1, 0, 3, 2]


def test_a_metric_whose_name_has_a_slash_is_found_too() -> None:
    config = CheckpointConfig(checkpoint_score_attribute="valid/auc")
    checkpoints = [Saved(0, {"valid/auc": 0.9, "valid": {"auc": 0.1}})]
    checkpoints += [Saved(1, {"valid": {"auc": 0.5}})]
    assert numbers(ranked(checkpoints, config)) == [0, 1]


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"valid": {}},
        {"valid": None},
        {"valid": [0.5]},
        {"valid": "auc"},
        {"valid": {"auc": None}},
        {"valid": {"auc": math.nan}},
        {"valid": {"auc": {"mean": 1.0}}},
        {"auc": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["max", "min"])
def test_what_has_no_nested_metric_is_worse_than_any_number(
    order: Order, metrics: Mapping[str, Any]
) -> None:
    config = CheckpointConfig(checkpoint_score_attribute="valid/auc", checkpoint_score_order=order)
    checkpoints = [Saved(0, {"valid": {"auc": -math.inf}}), Saved(1, {"valid": {"auc": math.inf}})]
    assert numbers(ranked([*checkpoints, Saved(2, metrics)], config))[-1] == 2


@pytest.mark.parametrize(("order", "expected"), [("max", [3, 2, 1, 0]), ("min", [1, 2, 3, 0])])
def test_an_infinity_is_a_number(order: Order, expected: list[int]) -> None:
    assert numbers(ranked(saved(math.nan, -math.inf, 0, math.inf), by_score(order))) == expected


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"score": 1.0}, None),
        ({"score": float("nan")}, None),
        ({"score": None}, None),
        ({"scores": 1.0, "loss": 2.0}, "the reported metrics are 'scores', 'loss' (did you mean "),
        ({}, "the reported metrics are none"),
        ({"score": "high"}, "the metric 'score' is a str, not a number"),
    ],
    ids=str,
)
def test_metrics_that_do_not_rank_a_checkpoint(metrics: dict[str, Any], why: str | None) -> None:
    found = missing_score(metrics, by_score())
    assert found is None if why is None else found and why in found


def test_metrics_rank_a_checkpoint_by_a_nested_name() -> None:
    config = CheckpointConfig(checkpoint_score_attribute="valid/score")
    assert missing_score({"valid": {"score": 1}}, config) is None
    assert missing_score({"valid": 1}, config) is not None


def test_the_newest_is_kept_until_a_newer_one_is_committed() -> None:
    first, second, third = saved(9, 1, 2)
    assert expendable([first, second], by_score(keep=1)) == []
    assert expendable([first, second, third], by_score(keep=1)) == [second]


def test_everything_is_kept_by_default() -> None:
    assert expendable(saved(*range(100)), CheckpointConfig()) == []


def test_the_best_and_the_newest_are_kept() -> None:
    assert numbers(expendable(saved(9, 8, 1), by_score(keep=1))) == [1]


def badness(score: Any, order: Order) -> float:
    if score is None or math.isnan(score):
        return math.inf
    return -score if order == "max" else score


scores = st.one_of(st.none(), st.floats(), st.integers(-5, 5))


@given(
    scores=st.lists(scores, max_size=12),
    keep=st.integers(1, 5),
    order=st.sampled_from(["max", "min"]),
)
def test_no_kept_checkpoint_but_the_newest_is_worse_than_a_deleted_one(
    scores: list[Any], keep: int, order: Order
) -> None:
    checkpoints, config = saved(*scores), by_score(order, keep=keep)
    deleted = expendable(checkpoints, config)
    places = numbers(ranked(checkpoints, config))
    assert sorted(places) == list(range(len(scores)))
    newest = range(len(scores))[-1:]
    assert set(places) - set(numbers(deleted)) == {*places[:keep], *newest}
    for better, worse in pairwise(places):
        assert badness(scores[better], order) <= badness(scores[worse], order)


@given(
    scores=st.lists(scores, min_size=1, max_size=12),
    keep=st.integers(1, 5),
    order=st.sampled_from(["max", "min"]),
)
def test_deleting_after_every_commit_keeps_the_best_of_all(
    scores: list[Any], keep: int, order: Order
) -> None:
    """None is deleted that would have been among the best in the end."""
    config, everything = by_score(order, keep=keep), saved(*scores)
    kept: list[Saved] = []
    for checkpoint in everything:
        kept.append(checkpoint)
        deleted = expendable(kept, config)
        assert checkpoint not in deleted
        kept = [other for other in kept if other not in deleted]
        assert len(kept) <= keep + 1
    best = ranked(everything, config)[:keep]
    assert set(numbers(kept)) == {*numbers(best), everything[-1].number}
