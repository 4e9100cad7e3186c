"""Accelerate's state, killed and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import HUGGING_FACE, equal
from tests.sweeps import only_in_sweep

from polytrain import (
    CheckpointConfig,
    Result,
    RunConfig,
    TrainingFailedError,
)

fit_with_library = partial(torch_runs.fit, libraries=HUGGING_FACE)


def train(config: dict[str, Any]) -> None:
    import os
    import signal

    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.accelerate import report, restore

    # Without, its samplers draw from a generator that it doesn't save.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    x = torch.arange(144.0).reshape(48, 3) / 144
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True),
    )
    torch.manual_seed(accelerator.process_index)
    context = polytrain.get_context()
    dies = context.get_world_rank() == 1 and context.get_attempt() == 0
    done = restore(accelerator)
    steps = 0
    for epoch in range(done.get("epoch", 0), 4):
        loader.set_epoch(epoch)
        rows = 0
        for x, y in loader:
            loss = (model(x)[:, 0] - y).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            rows += len(x)
            steps += 1
            if dies and steps == config["dies_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
        metrics = {"rows": rows, "steps": steps, "workers": accelerator.num_processes}
        report(accelerator, {"loss": loss, **metrics}, epoch=epoch + 1)


def fit(quiet: RunConfig, *, dies_at: int = -1, **changes: Any) -> Result:
    return fit_with_library(quiet, train, {"dies_at": dies_at}, **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    return load_file(Path(result.checkpoint.path, "model.safetensors"))


# In `make test` each who writes once: here rank 0, every rank where their states differ.
@pytest.mark.sweep
@pytest.mark.parametrize("written_by", ["rank_0", only_in_sweep("every_rank")])
def test_a_killed_run_ends_in_the_same_weights(quiet: RunConfig, written_by: Any) -> None:
    config = CheckpointConfig(written_by=written_by)
    undisturbed = fit(quiet, checkpoint_config=config)
    killed = fit(quiet, dies_at=13, checkpoint_config=config)
    assert killed.restarts == 1
    assert (killed.metrics["workers"], killed.metrics["rows"]) == (2, 24)
    # The last attempt has done a part of the 24 steps.
    assert killed.metrics["steps"] in (12, 18)
    assert undisturbed.metrics["steps"] == 24
    assert equal(weights(killed), weights(undisturbed))


def test_one_worker_is_enough(quiet: RunConfig) -> None:
    result = fit(quiet, workers=1)
    assert (result.metrics["workers"], result.metrics["rows"]) == (1, 48)


def names_its_checkpoints(config: dict[str, Any]) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from polytrain_torch.accelerate import restore

    naming = ProjectConfiguration(automatic_checkpoint_naming=True)
    restore(Accelerator(project_config=naming))


def test_accelerates_own_names_are_refused(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match=r"automatic_checkpoint_naming.*Leave it out"):
        fit_with_library(quiet, names_its_checkpoints, {})


def saves_what_it_cannot_load(config: dict[str, Any]) -> None:
    import torch
    from accelerate import Accelerator

    from polytrain_torch.accelerate import report

    class Counter:
        def state_dict(self) -> dict[str, int]:
            return {"count": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if config["part"] == "counter":
                raise KeyError("counts")

    class Optimizer(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            # Accelerate itself loads the state of one that has none yet.
            if config["part"] == "optimizer" and state_dict["state"]:
                raise KeyError("moments")
            super().load_state_dict(state_dict)

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.last.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

        def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
            if config["part"] == "model":
                state_dict = {f"old_{name}": each for name, each in state_dict.items()}
            return super().load_state_dict(state_dict, *args, **options)

    accelerator = Accelerator()
    own = Tied()
    optimizer = Optimizer(own.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, _ = accelerator.prepare(own, optimizer, scheduler)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.register_for_checkpointing(Counter())
    report(accelerator, {"saved": True})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("model", r"(?s)Tied: .*can't be loaded.*old_first"),
        ("optimizer", "Optimizer: .*raised KeyError: 'moments'"),
        ("counter", "Counter: .*raised KeyError: 'counts'"),
        (None, None),
    ],
)
def test_what_can_be_saved_and_not_loaded_fails_at_the_first_report(
    quiet: RunConfig, part: str | None, message: str | None
) -> None:
    if message is None:
        result = fit_with_library(quiet, saves_what_it_cannot_load, {"part": part})
        assert result.metrics == {"saved": True}
        return
    with pytest.raises(TrainingFailedError, match=message):
        fit_with_library(quiet, saves_what_it_cannot_load, {"part": part})


def train_apart(config: dict[str, Any]) -> list[Any]:
    """Each rank returns what it ends with."""
    import os
    import signal

    import torch
    import torchmetrics
    from accelerate import Accelerator, DistributedDataParallelKwargs

    import polytrain
    from polytrain_torch.accelerate import report, restore

    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    unsent = DistributedDataParallelKwargs(broadcast_buffers=config["sends"])
    accelerator = Accelerator(kwargs_handlers=[unsent])
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    counter, mean = Counter(), torchmetrics.MeanMetric()
    if config["counts"]:
        accelerator.register_for_checkpointing(counter, mean)
    done = restore(accelerator)
    rows = done.get("rows", 0)
    context = polytrain.get_context()
    rank = context.get_world_rank()
    for epoch in range(done.get("epoch", 0), 4):
        if rank == 1 and context.get_attempt() == 0 and epoch == config.get("dies_in"):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.arange(12.0).reshape(4, 3) * (rank + 1)
        accelerator.backward(model(x).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        counter.count += rank + 1
        mean.update(x.mean())
        rows += rank + 1
        progress = {"rows": rows} if config["counts"] else {}
        report(accelerator, {"loss": 0.0}, epoch=epoch + 1, **progress)
    model(torch.ones(4, 3))
    state = [each.tolist() for each in inner.state_dict().values()]
    return [rows, counter.count, mean.mean_value.item(), state]


@pytest.mark.sweep
@pytest.mark.parametrize("written_by", [only_in_sweep("rank_0"), "every_rank"])
def test_what_differs_by_rank_comes_back_to_its_rank(quiet: RunConfig, written_by: Any) -> None:
    """Registered objects, metrics, BatchNorm's statistics and progress."""
    fit = partial(fit_with_library, checkpoint_config=CheckpointConfig(written_by=written_by))
    config = {"sends": False, "counts": True}
    undisturbed = fit(quiet, train_apart, config)
    killed = fit(quiet, train_apart, {**config, "dies_in": 2})
    assert killed.restarts == 1
    assert killed.return_values == undisturbed.return_values
    assert [each[:2] for each in killed.return_values] == [[4, 4], [8, 8]]
    with pytest.raises(
        TrainingFailedError,
        match=r"model 0 \(Sequential\), registered object 0 \(Counter\).*rows: each of the 2",
    ):
        fit(quiet, train_apart, config, workers=1, restore_from=killed.checkpoint)


def test_what_ddp_keeps_equal_is_stored_once(quiet: RunConfig) -> None:
    """BatchNorm's statistics too, which rank 0 sends: any number of workers can resume."""
    config = {"sends": True, "counts": False}
    made = fit_with_library(quiet, train_apart, config)
    assert made.checkpoint is not None
    assert not [*Path(made.checkpoint.path).glob("own-*")]
    fit_with_library(quiet, train_apart, config, workers=1, restore_from=made.checkpoint)


def train_on_each_row_once(config: dict[str, Any]) -> None:
    """Rank `rank` dies at a place of a step, counted from 1, in the first attempt."""
    import os
    import signal

    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch import prepare_data_loader, seed_everything
    from polytrain_torch.accelerate import report, restore

    class Counts:
        steps = 0

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and context.get_world_rank() == config["rank"]

    def at(place: str) -> None:
        if dies and (place, counts.steps + 1) == (config["place"], config["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
    model, optimizer, scheduler = accelerator.prepare(
        inner, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    )
    counts = Counts()
    accelerator.register_for_checkpointing(counts)
    x = torch.arange(3.0 * 96).reshape(-1, 3) / 96
    loader = prepare_data_loader(DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True))
    seed_everything(7)
    done = restore(accelerator)
    for epoch in range(done.get("epoch", 0), 3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x)[:, 0] - y).square().mean()
                at("forward")
                accelerator.backward(loss)
                at("backward")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counts.steps += 1
            at("step")
        report(
            accelerator,
            {"steps": counts.steps, "rate": scheduler.get_last_lr()[0]},
            epoch=epoch + 1,
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    run = RunConfig(storage_path=tmp_path_factory.mktemp("undisturbed"), progress=False)
    return fit_with_library(run, train_on_each_row_once, {"place": "", "step": 0, "rank": 1})


# In `make test`, with gradients that are accumulated. Places are torch's own: `test_survivors` has
# them.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "step", "rank"),
    [
        only_in_sweep("forward", 7, 1),
        ("backward", 16, 0),
        only_in_sweep("step", 11, 1),
        only_in_sweep("step", 36, 0),
    ],
)
def test_no_step_is_repeated(
    quiet: RunConfig, undisturbed: Result, place: str, step: int, rank: int
) -> None:
    places = {"place": place, "step": step, "rank": rank}
    killed = fit_with_library(quiet, train_on_each_row_once, places)
    [asked] = journal(killed.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert killed.restarts == 1
    assert killed.history == undisturbed.history
    assert equal(weights(killed), weights(undisturbed))
