"""A killed run of torch's ends in the weights of one that wasn't: what checkpoints hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import (
    CheckpointConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)

EPOCHS, ROWS = 4, 96


def train(config: dict[str, Any]) -> None:
    """Dropout, NumPy and Python draw, a scheduler and momentum remember."""
    import os
    import random
    import signal

    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch

    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )
    model = polytrain_torch.prepare_model(inner, parallel_strategy=config["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.arange(3.0 * config["rows"]).reshape(-1, 3) / config["rows"]
    loader = polytrain_torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=8, shuffle=True)
    )
    polytrain_torch.seed_everything(7)
    state = polytrain_torch.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    done = state.restore()
    context = polytrain.get_context()
    dies = context.get_world_rank() == 1 and context.get_attempt() == 0
    steps = 0
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        for x, y in loader:
            noise = random.random() + np.random.random()
            loss = (model(x)[:, 0] - y * (1 + 0.1 * noise)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if dies and steps == config["dies_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
        scheduler.step()
        state.report({"loss": loss.item()}, epoch=epoch + 1)


def fit(quiet: RunConfig, *, strategy: str = "ddp", dies_at: int = -1, **changes: Any) -> Result:
    config = {"strategy": strategy, "rows": ROWS, "epochs": EPOCHS, "dies_at": dies_at}
    return torch_runs.fit(quiet, train, config, **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = result.load_model()
    assert loaded
    return loaded


EVERY_RANK = CheckpointConfig(written_by="every_rank")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(EVERY_RANK, id="every rank"),
        only_in_sweep(CheckpointConfig(), id="rank 0"),
    ],
)
def test_a_killed_sharded_run_ends_in_the_same_weights(
    quiet: RunConfig, config: CheckpointConfig
) -> None:
    """To the last bit. The parts that the ranks wrote make one model."""
    undisturbed = fit(quiet, strategy="fsdp", checkpoint_config=config)
    killed = fit(quiet, strategy="fsdp", dies_at=18, checkpoint_config=config)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))


def test_a_killed_run_ends_in_the_same_weights(quiet: RunConfig) -> None:
    """To the last bit."""
    undisturbed, killed = fit(quiet), fit(quiet, dies_at=18)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))
    assert killed.history == undisturbed.history


def pass_on(config: dict[str, Any]) -> None:
    """Makes a checkpoint of what it has restored."""
    import torch

    import polytrain_torch

    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )
    model = polytrain_torch.prepare_model(inner, parallel_strategy=config["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = polytrain_torch.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    state.report({}, **state.restore())


def passed_on(quiet: RunConfig, before: Result, strategy: str, workers: int, by: str) -> Result:
    writes = CheckpointConfig(written_by=by)  # type: ignore[arg-type]  # it is one of two
    return make_trainer(
        "torch",
        pass_on,
        train_loop_config={"strategy": strategy},
        restore_from=before.checkpoint,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(quiet, checkpoint_config=writes),
    ).fit()


def test_a_model_is_sharded_and_put_together_again(quiet: RunConfig) -> None:
    """And so are the optimizer's states: by three ranks, by two, by one that writes for all."""
    trained = fit(quiet)
    sharded = passed_on(quiet, trained, "fsdp", 3, by="every_rank")
    otherwise = passed_on(quiet, sharded, "fsdp", 2, by="rank_0")
    again = passed_on(quiet, otherwise, "fsdp", 2, by="every_rank")
    whole = passed_on(quiet, again, "ddp", 2, by="rank_0")
    for later in (sharded, otherwise, again, whole):
        assert equal(weights(later), weights(trained))
    before, after = (
        torch.load(f"{result.checkpoint.path}/state.pt", weights_only=True)
        for result in (trained, whole)
    )
    assert before["progress"] == after["progress"] == {"epoch": EPOCHS}
    assert before["parts"]["scheduler"] == after["parts"]["scheduler"]
    ours, theirs = (each["parts"]["optimizer"]["state"] for each in (after, before))
    assert ours.keys() == theirs.keys()
    assert all(equal(ours[number], theirs[number]) for number in ours)
