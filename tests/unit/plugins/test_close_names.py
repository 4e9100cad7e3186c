"""Suggestions for misspelt names."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain_plugins.close_names import ALMOST_THE_SAME, close_to, did_you_mean, did_you_mean_file


@pytest.mark.parametrize(
    ("name", "meant"),
    [("xgbost", "xgboost"), ("XGBoost", "xgboost"), ("lightgmb", "lightgbm"), ("LABEL", "Label")],
)
def test_the_most_similar_name_is_suggested_whatever_its_case(name: str, meant: str) -> None:
    assert did_you_mean(name, ["torch", "lightgbm", "xgboost", "Label"]) == (
        f"Did you mean {meant!r}? "
    )


def test_nothing_is_suggested_if_nothing_is_similar() -> None:
    assert did_you_mean("jax", ["torch", "xgboost"]) == ""
    assert close_to("jax", []) == []


def test_a_cutoff_leaves_names_alone_that_may_be_right() -> None:
    assert close_to("max_leaf_depth", ["max_depth"]) == ["max_depth"]
    assert close_to("max_leaf_depth", ["max_depth"], cutoff=ALMOST_THE_SAME) == []


def test_a_missing_file_gets_the_name_of_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert did_you_mean_file(tmp_path / "trian.py") == f"Did you mean '{tmp_path}/train.py'? "
    assert did_you_mean_file(tmp_path / "nowhere" / "train.py") == ""


def test_neither_a_file_itself_is_suggested_nor_one_that_shares_an_ending_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "crop.png").touch()
    assert did_you_mean_file(tmp_path / "crop.png") == ""
    assert did_you_mean_file(tmp_path / "nope.py") == ""
