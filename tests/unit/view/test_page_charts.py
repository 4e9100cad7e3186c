"""Training and validation share a chart, and what a run is judged by comes first."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.view.test_page_curves import reports

from polytrain.view.page.charts import MOST_LINES, Better, better, charts_of, headlines_of
from polytrain.view.page.curves import metrics_of


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (("loss", "val_loss"), "loss"),
        (("train/loss", "eval/loss"), "loss"),
        (("train_auc", "valid_auc"), "auc"),
        (("train-logloss", "valid-logloss"), "logloss"),
        (("training accuracy", "validation accuracy"), "accuracy"),
        (("model/train/f1", "model/test/f1"), "model/f1"),
        (("loss_train", "loss_val"), "loss"),
        (("train/auc", "eval_0/auc", "eval_1/auc"), "auc"),
        (("Loss", "val_loss"), "loss"),
    ],
)
def test_training_and_validation_share_a_chart(names: tuple[str, ...], title: str) -> None:
    [chart] = charts_of(names)
    assert (chart.title, chart.metrics) == (title, names)


@pytest.mark.parametrize(
    "names", [("loss", "value_loss"), ("train", "eval"), ("latest", "lat"), ("a/loss", "b/loss")]
)
def test_other_metrics_have_a_chart_each(names: tuple[str, ...]) -> None:
    assert {chart.title for chart in charts_of(names)} == set(names)


def test_a_metric_alone_keeps_its_name() -> None:
    assert [chart.title for chart in charts_of(["val_loss", "epoch"])] == ["val_loss", "epoch"]


def test_what_a_run_is_judged_by_comes_first() -> None:
    names = ["epoch", "rate", "loss", "val_loss", "mine"]
    assert [chart.title for chart in charts_of(names, "mine")] == ["mine", "loss", "epoch", "rate"]


def test_more_lines_than_can_be_told_apart_are_split() -> None:
    names = [f"eval_{number}/auc" for number in range(6)]
    assert [len(chart.metrics) for chart in charts_of(names)] == [MOST_LINES, 2]


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("val_loss", Better.LOWEST),
        ("rmse", Better.LOWEST),
        ("logloss", Better.LOWEST),
        ("train/boxloss", Better.LOWEST),
        ("eval/accuracy", Better.HIGHEST),
        ("valid_auc", Better.HIGHEST),
        ("learning_rate", None),
        ("grad_norm", None),
        ("power", None),
        ("interrupts", None),
    ],
)
def test_which_value_is_best(name: str, direction: Better | None) -> None:
    assert better(name) is direction


@pytest.mark.parametrize(("order", "best", "step"), [("max", 3.0, 2), ("min", 1.0, 1)])
def test_checkpoints_are_kept_by_the_best_value(order: str, best: float, step: int) -> None:
    of = "run_config.checkpoint_config.checkpoint_score"
    settings: dict[str, Any] = {f"{of}_attribute": "mine", f"{of}_order": order}
    metrics = metrics_of(reports({"mine": 1.0}, {"mine": 3.0}, {"mine": 2.0}), [])
    [headline] = headlines_of(metrics, charts_of(["mine"], "mine"), settings)
    assert (headline.last, headline.best, headline.step) == (2.0, best, step)
