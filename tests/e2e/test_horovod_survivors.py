"""A loss costs a loop with Horovod's optimizer no step, if all ranks have the same weights."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import Result, RunConfig


def train(config: dict[str, Any]) -> None:
    """Rank `rank` dies at a place of a step, counted from 1, in the first attempt."""
    import os
    import signal

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch
    import polytrain_torch.horovod as hvd

    hvd.init()
    torch.manual_seed(0 if config["broadcasts"] else hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 1),
    )
    if config["broadcasts"]:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.arange(3.0 * 160).reshape(-1, 3) / 160
    loader = polytrain_torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=16, shuffle=True)
    )
    polytrain_torch.seed_everything(7)
    state = polytrain_torch.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    done = state.restore()
    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and hvd.rank() == config["rank"]

    class Steps:
        """Counts what this attempt does; nothing that trains reads it."""

        taken = 0

    def at(place: str) -> None:
        Steps.taken += place == "begin"
        if dies and (place, Steps.taken) == (config["place"], config["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in range(done.get("epoch", 0), 3):
        for x, y in loader:
            at("begin")
            optimizer.zero_grad()
            loss = (model(x)[:, 0] - y).square().mean()
            at("forward")
            loss.backward()
            at("backward")
            optimizer.step()
            at("step")
            scheduler.step()
        state.report({"rate": scheduler.get_last_lr()[0]}, epoch=epoch + 1)


def fit(quiet: RunConfig, place: str = "", step: int = 0, **config: Any) -> Result:
    chosen = {"place": place, "step": step, "rank": 1, "broadcasts": True, **config}
    return torch_runs.fit(quiet, train, chosen, libraries=("polytrain_torch.horovod",))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(RunConfig(storage_path=tmp_path_factory.mktemp("undisturbed"), progress=False))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "step", "rank"),
    [only_in_sweep("forward", 3, 1), only_in_sweep("begin", 4, 0), ("backward", 8, 0)],
)
def test_no_step_is_repeated(
    quiet: RunConfig, undisturbed: Result, place: str, step: int, rank: int
) -> None:
    result = fit(quiet, place, step, rank=rank)
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert equal(result.load_model(), undisturbed.load_model())
    assert result.history == undisturbed.history


def test_other_weights_on_each_rank_are_nobody_elses(quiet: RunConfig) -> None:
    result = fit(quiet, "forward", 4, broadcasts=False)
    [asked] = journal(result.path, "SurvivorsAsked")
    assert "its parameters differ between the ranks" in asked["reason"]
