"""A prepared model can be used like the model that it wraps, on one worker and on several."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain_torch import prepare_model

Run = Callable[..., Any]


class Scorer(torch.nn.Module):
    """Has names that DDP has too, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
        self.temperature = 2.0
        self.dim = 3  # DDP has one of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.temperature

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).round()

    @property
    def rows(self) -> int:
        return 7


def uses_the_model() -> None:
    model = prepare_model(Scorer())
    scorer = model.module
    assert (model.rows, model.temperature, scorer.dim) == (7, 2.0, 3)
    model.temperature = 4.0
    assert scorer.temperature == 4.0
    model.label = "own"
    assert not hasattr(scorer, "label")

    with torch.no_grad():
        assert model.generate(torch.ones(2, 3)).shape == (2, 1)
    model.eval()
    assert model.generate(torch.ones(2, 3)).shape == (2, 1)
    model.train()
    with pytest.raises(RuntimeError, match=r"generate\(\) runs the model with gradients.*forward"):
        model.generate(torch.ones(2, 3))
    with pytest.raises(AttributeError, match=r"'inner' is a part.*use model\.module\.inner"):
        _ = model.inner
    with pytest.raises(AttributeError, match=r"'Scorer' object has no attribute 'nothing'"):
        _ = model.nothing

    assert copy.deepcopy(model).temperature == 4.0
    with model.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    polytrain.report({"ok": True})


def test_attributes_and_methods_are_the_models(run: Run) -> None:
    assert run(uses_the_model).metrics == {"ok": True}


def test_they_are_on_two_workers(tmp_path: Path) -> None:
    result = make_trainer(
        "torch",
        uses_the_model,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    assert result.metrics == {"ok": True}
