"""State of torch's that differs by rank: a killed run ends as one that wasn't, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, Result, RunConfig, TrainingFailedError


def train(config: dict[str, Any]) -> list[Any]:
    """Everything that can differ by rank: each rank returns what it ends with."""
    import os
    import signal

    import torch
    import torchmetrics

    import polytrain
    import polytrain_torch
    from polytrain_torch import TrainingState, prepare_model

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    class Summed(Counter):
        def load_state_dicts(self, states: list[dict[str, int]]) -> None:
            total = sum(each["count"] for each in states)
            self.count = total if polytrain.get_context().get_world_rank() == 0 else 0

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    context = polytrain.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(0)
    shared = prepare_model(
        network(),
        parallel_strategy=config.get("strategy", "ddp"),
        parallel_strategy_kwargs=config.get("kwargs"),
    )
    own = network()
    generator = torch.Generator().manual_seed(rank)
    accuracy = torchmetrics.MeanMetric()
    counter, summed = Counter(), Summed()
    optimizers = {
        "shared_optimizer": torch.optim.SGD(shared.parameters(), lr=0.1, momentum=0.9),
        "own_optimizer": torch.optim.Adam(own.parameters(), lr=0.1),
    }
    parts = {
        "model": shared,
        "own": own,
        "generator": generator,
        "accuracy": accuracy,
        "counter": counter,
        "summed": summed,
        **optimizers,
    }
    parts = {name: parts[name] for name in config.get("parts", parts)}
    state = TrainingState(**parts)
    rows = state.progress.get("rows", 0)
    done = state.restore()
    assert done.get("rows", 0) == rows
    resumed = [rows, counter.count, summed.count]
    for epoch in range(done.get("epoch", 0), config.get("epochs", 4)):
        if rank == 1 and context.get_attempt() == 0 and epoch == config.get("dies_in"):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.rand(8, 3, generator=generator) + rank
        for model in (shared, own):
            model(x).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        accuracy.update(x.sum())
        counter.count += rank + 1
        summed.count += rank + 1
        rows += 10 * (rank + 1)
        progress = {"rows": rows} if config.get("counts_rows", True) else {}
        state.report({"loss": 0.0}, epoch=epoch + 1, **progress)
    # A step of all ranks, in which DDP sends buffers if it does so.
    shared(torch.ones(8, 3))
    whole = polytrain_torch.engine.unwrapped(shared).state_dict().values()
    return [
        rows,
        counter.count,
        summed.count,
        float(accuracy.mean_value.sum()),
        generator.get_state().tolist(),
        [each.tolist() for each in own.state_dict().values()],
        [(each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for each in whole],
        resumed,
    ]


def fit(quiet: RunConfig, config: dict[str, Any], **changes: Any) -> Result:
    return torch_runs.fit(quiet, train, config, libraries=torch_runs.HUGGING_FACE, **changes)


def ends(result: Result) -> list[list[Any]]:
    """By rank, without what the last attempt has begun with."""
    return [each[:-1] for each in result.return_values]


UNSENT = {"kwargs": {"broadcast_buffers": False}}
FSDP = {"strategy": "fsdp"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "written_by"),
    [
        only_in_sweep({}, "rank_0", id="ddp, rank 0"),
        pytest.param(UNSENT, "every_rank", id="unsent buffers, every rank"),
        pytest.param(FSDP, None, id="fsdp"),
        only_in_sweep({}, "every_rank", id="ddp, every rank"),
        only_in_sweep({}, None, id="ddp"),
        only_in_sweep(UNSENT, "rank_0", id="unsent buffers, rank 0"),
        only_in_sweep(FSDP, "rank_0", id="fsdp, rank 0"),
        only_in_sweep(FSDP, "every_rank", id="fsdp, every rank"),
    ],
)
def test_what_differs_comes_back_to_its_rank(
    quiet: RunConfig, model: dict[str, Any], written_by: Any
) -> None:
    writes = CheckpointConfig(written_by=written_by)
    undisturbed = fit(quiet, model, checkpoint_config=writes)
    killed = fit(quiet, {**model, "dies_in": 2}, checkpoint_config=writes)
    assert killed.restarts == 1
    assert ends(killed) == ends(undisturbed)
    first, second = ends(killed)
    assert (first[0], second[0]) == (40, 80)


def test_models_that_are_averaged_now_and_then_come_back_to_their_ranks(quiet: RunConfig) -> None:
    """As local SGD trains them: DDP whose gradients aren't averaged in most steps.

    A rank is lost in a step that averages them, between two checkpoints. The other one's weights
    aren't those of both.
    """
    undisturbed = torch_runs.fit(quiet, train_locally, {"dies_in": -1})
    killed = torch_runs.fit(quiet, train_locally, {"dies_in": 5})
    assert killed.restarts == 1
    first, second = killed.return_values
    assert first != second
    assert killed.return_values == undisturbed.return_values


def train_locally(config: dict[str, Any]) -> list[float]:
    import os
    import signal
    from contextlib import nullcontext

    import torch
    from torch.utils.data import DataLoader

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader, prepare_model

    context = polytrain.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = TrainingState(model=model, optimizer=optimizer)
    state.restore()
    for numbers in prepare_data_loader(DataLoader(torch.arange(12) // 2)):
        number = int(numbers)
        averages = number % 3 == 2
        if rank == 1 and context.get_attempt() == 0 and number == config["dies_in"]:
            os.kill(os.getpid(), signal.SIGKILL)
        with nullcontext() if averages else model.no_sync():
            (model(torch.ones(2, 3)) - rank).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if averages:
            state.report({"loss": 0.0})
    return [float(each) for each in model.module.weight.flatten()]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("config", "named"),
    [
        only_in_sweep({"parts": ["counter"]}, "counter: each of the 2 workers", id="part"),
        pytest.param({"parts": [], "counts_rows": True}, "progress 'rows': each", id="progress"),
        pytest.param({"parts": ["model"], **UNSENT}, "model: each", id="unsent buffers"),
        only_in_sweep({"parts": ["model", "shared_optimizer"], **FSDP}, "model: each", id="fsdp"),
        only_in_sweep({"parts": ["accuracy", "generator"]}, "accuracy, generator: each", id="two"),
        only_in_sweep({"parts": ["own"]}, "own: each", id="own model"),
    ],
)
def test_on_other_workers_an_error_names_what_differs(
    quiet: RunConfig, config: dict[str, Any], named: str
) -> None:
    config = {"counts_rows": False, **config}
    made = fit(quiet, {**config, "epochs": 1})
    with pytest.raises(TrainingFailedError, match=rf"{named}.*ScalingConfig\(num_workers=2\)"):
        fit(quiet, config, workers=1, restore_from=made.checkpoint)


def test_a_part_may_merge_the_states_of_all_ranks(quiet: RunConfig) -> None:
    config = {"counts_rows": False, "parts": ["summed"], "epochs": 2}
    made = fit(quiet, config)
    resumed = [
        each[-1][2]
        for each in fit(quiet, config, workers=3, restore_from=made.checkpoint).return_values
    ]
    assert resumed == [6, 0, 0]


def test_what_ddp_keeps_equal_is_stored_once(quiet: RunConfig) -> None:
    """BatchNorm's statistics too, which rank 0 sends: any number of workers can resume."""
    config = {"counts_rows": False, "parts": ["model", "shared_optimizer"]}
    made = fit(quiet, {**config, "epochs": 2})
    assert made.checkpoint is not None
    files = {each.name for each in Path(made.checkpoint.path).iterdir()}
    assert not [name for name in files if name.startswith("own-")]
    assert len(fit(quiet, config, workers=3, restore_from=made.checkpoint).return_values) == 3
