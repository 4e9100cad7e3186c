"""Curves of few points: every extreme survives, and what isn't a number is no point."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.record.reports import Reports
from polytrain.view.page.curves import MOST_CURVES, MOST_UNDONE, Metric, decimated, metrics_of

FLOATS = st.floats(width=32)


def reports(*rows: dict[str, object], first: int = 1) -> Reports:
    made = Reports()
    for step, metrics in enumerate(rows, first):
        made.add(step, metrics)
    return made


def by_name(found: tuple[Metric, ...]) -> dict[str, Metric]:
    return {metric.name: metric for metric in found}


@given(st.lists(FLOATS, min_size=1, max_size=200), st.integers(4, 40))
def test_the_ends_and_the_extremes_are_kept(numbers: list[float], most: int) -> None:
    values = np.array(numbers)
    kept = decimated(values, most)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= max(len(values) if len(values) <= most else 0, 2 * (2 + 2 * (most // 2)))
    finite = values[np.isfinite(values)]
    if len(finite):
        shown = values[kept][np.isfinite(values[kept])]
        assert (shown.min(), shown.max()) == (finite.min(), finite.max())
    assert np.isfinite(values).all() == np.isfinite(values[kept]).all()


def test_nested_metrics_have_the_names_of_their_paths() -> None:
    found = by_name(metrics_of(reports({"eval": {"loss": 1.0, "by": {"a/b": 2}}, "note": "x"}), []))
    assert found["eval/loss"].last == 1.0
    assert found["eval/by/a/b"].last == 2
    assert found["note"].last == "x"
    assert found["note"].curve is None


def test_a_metric_of_several_types_is_one_curve() -> None:
    found = by_name(metrics_of(reports({"m": 1}, {"m": 0.5}, {"m": True}, {"m": 2**70}), []))
    curve = found["m"].curve
    assert curve is not None
    assert curve.steps == (1, 2, 3, 4)
    assert curve.values == (1.0, 0.5, 1.0, pytest.approx(2**70, rel=1e-5))


def test_what_is_not_finite_is_a_gap_and_is_counted() -> None:
    found = by_name(metrics_of(reports({"m": math.nan}, {"m": 1.0}, {"m": -math.inf}), []))
    metric = found["m"]
    assert metric.curve is not None
    assert metric.curve.values == (None, 1.0, None)
    assert (metric.not_finite, metric.lowest, metric.highest) == (2, 1.0, 1.0)


def test_no_line_bridges_what_is_not_finite() -> None:
    values = np.array([math.nan, 1.0] * 5000)
    shown = np.isfinite(values[decimated(values, 100)])
    assert shown.any()
    assert not (shown[1:] & shown[:-1]).any()


@pytest.mark.parametrize(("start", "each"), [(1.0, 1e-7), (1e15, 1.0), (-5.0, 1e-9), (0.0, 1e-30)])
def test_a_curve_has_no_steps_of_its_own(start: float, each: float) -> None:
    rows = [{"m": start + each * step} for step in range(50)]
    curve = by_name(metrics_of(reports(*rows), []))["m"].curve
    assert curve is not None
    steps = np.diff([value for value in curve.values if value is not None])
    assert steps == pytest.approx([each] * 49, rel=0.02)


def test_where_the_lowest_and_the_highest_value_were() -> None:
    values = (3.0, 1.0, math.nan, 4.0, 1.0)
    metric = by_name(metrics_of(reports(*({"m": value} for value in values)), []))["m"]
    assert (metric.lowest, metric.lowest_step) == (1.0, 2)
    assert (metric.highest, metric.highest_step) == (4.0, 4)


def test_what_a_validation_adds_belongs_to_its_report() -> None:
    made = reports({"m": 1.0}, {"m": 2.0}, {"m": 3.0})
    made.merge(2, {"accuracy": 0.5})
    curve = by_name(metrics_of(made, []))["accuracy"].curve
    assert curve is not None
    assert (curve.steps, curve.values) == ((2,), (0.5,))


def test_what_was_done_again_is_kept_apart() -> None:
    lost = reports({"m": 9.0}, {"other": 1.0}, first=2)
    metric = by_name(metrics_of(reports({"m": 1.0}, {"m": 2.0}), [lost]))["m"]
    assert [(part.steps, part.values) for part in metric.undone] == [((2,), (9.0,))]


def test_the_points_of_many_metrics_are_bounded() -> None:
    rows = [{f"m{name}": float(row) for name in range(500)} for row in range(200)]
    found = metrics_of(reports(*rows), [])
    drawn = [metric for metric in found if metric.curve is not None]
    assert len(found) == 500
    assert len(drawn) == MOST_CURVES
    assert all(metric.is_decimated for metric in drawn)
    assert sum(len(metric.curve.steps) for metric in drawn if metric.curve) < 6000


def test_of_many_restarts_the_last_are_drawn() -> None:
    lost = [reports({"m": float(number)}, first=2) for number in range(500)]
    metric = by_name(metrics_of(reports({"m": 1.0}), lost))["m"]
    assert len(metric.undone) == MOST_UNDONE
    assert metric.undone[-1].values == (499.0,)


def test_a_long_value_is_cut() -> None:
    last = by_name(metrics_of(reports({"m": list(range(10_000))}), []))["m"].last
    assert len(last) < 300
