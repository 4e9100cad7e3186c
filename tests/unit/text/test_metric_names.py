"""What the name of a metric says of its values."""

from __future__ import annotations

import pytest

from polytrain.text.metrics import is_good_when_small


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("loss", True),
        ("val_loss", True),
        ("train-logloss", True),
        ("valid/cross_entropy", True),
        ("valid_0-rmse", True),
        ("eval-merror", True),
        ("accuracy", False),
        ("auc", False),
        ("terror_alerts", False),
        ("mean_accuracy", False),
        ("tokens", False),
        ("Poisson-Deviance", True),
        ("fid", True),
        ("fidelity", False),
    ],
)
def test_names_of_what_training_makes_smaller(name: str, small: bool) -> None:
    assert is_good_when_small(name) == small
