"""A prepared model can be used like the model that it wraps, on one worker and on several."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain.testing.local_world import run_world
from polytrain_torch import Torch, prepare_model

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


def test_gradients_that_nobody_averages_are_refused(tmp_path: Path) -> None:
    """A loop that steps by `torch.autograd.grad` would train a model of its own on each rank."""

    def train() -> None:
        from torch.autograd import grad

        model = prepare_model(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)))
        x = torch.ones(3, 2, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"gradient of '0.weight'.*Call loss.backward\(\)"):
            grad(model(x).sum(), list(model.parameters()))
        with pytest.raises(RuntimeError, match=r"gradient of '1.bias'.*model.no_sync\(\)"):
            grad(model(x).sum(), model.module[1].bias)
        # Neither the inputs' gradients, as in a gradient penalty, nor what isn't to be averaged.
        penalty = grad(model(x).sum(), x, create_graph=True)[0].square().sum()
        (model(x).sum() + penalty).backward()
        with model.no_sync():
            ours = grad(model(x).sum(), list(model.parameters()))
        other = torch.nn.Linear(2, 1)
        grad(other(x).sum(), list(other.parameters()))
        polytrain.report({"gradients": len(ours)})

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    assert result.metrics == {"gradients": 4}


def test_weights_that_are_frozen_are_rank_0s_and_stay_frozen(tmp_path: Path) -> None:
    """DDP doesn't average what is trained later: ranks would diverge without a word."""

    def train(config: Any) -> None:
        import torch

        from polytrain_torch import prepare_model

        def refusal(model: Any) -> str:
            try:
                model(torch.ones(1, 2)).sum().backward()
            except RuntimeError as error:
                return str(error)
            return ""

        torch.manual_seed(polytrain.get_context().get_world_rank())
        whole, part = (
            torch.nn.Linear(2, 1),
            torch.nn.Sequential(*map(torch.nn.Linear, [2, 1], [1, 1])),
        )
        whole.requires_grad_(False)
        part[0].requires_grad_(False)
        prepared = prepare_model(whole), prepare_model(part)
        weights = whole.weight.flatten().tolist()
        before = [refusal(prepared[1])]
        with torch.no_grad():
            prepared[0](torch.ones(1, 2))
        for model in (whole, part):
            model.requires_grad_(True)
        with torch.no_grad():
            prepared[0](torch.ones(1, 2))
        polytrain.report({"weights": weights, "before": before, "after": [*map(refusal, prepared)]})

    record = run_world(
        Torch(timeout_s=60),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        training_function=train,
        training_config={},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    first, second = (rank.reports[0].metrics for rank in record.ranks)
    assert first == second
    assert first["before"] == [""]
    for refused in first["after"]:
        assert "prepare_model" in refused
