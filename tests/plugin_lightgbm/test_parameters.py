"""What LightGBM is really given, as the model tells it afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from polytrain import RunConfig, ScalingConfig, make_trainer

X = np.random.default_rng(0).normal(size=200)
DATA = {"x": X, "y": (X > 0).astype(float)}


def parameters(path: Path, **params: object) -> dict[str, str]:
    """The parameters that the model was trained with, by LightGBM's own names."""
    trainer = make_trainer(
        "lightgbm",
        label="y",
        params={"objective": "binary", **params},
        num_boost_round=2,
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=path, progress=False),
    )
    text = trainer.fit().load_model().model_to_string()
    return dict(re.findall(r"^\[(\w+): (.*)\]$", text, flags=re.MULTILINE))


def test_the_workers_cpus_are_its_threads(tmp_path: Path) -> None:
    assert parameters(tmp_path)["num_threads"] == "1"


@pytest.mark.parametrize("name", ["num_threads", "num_thread", "n_jobs", "nthread"])
def test_a_users_threads_win_however_they_are_spelt(tmp_path: Path, name: str) -> None:
    assert parameters(tmp_path, **{name: 2})["num_threads"] == "2"


@pytest.mark.parametrize("name", ["verbosity", "verbose"])
def test_a_users_verbosity_wins_however_it_is_spelt(tmp_path: Path, name: str) -> None:
    assert parameters(tmp_path, **{name: 0})["verbosity"] == "0"
