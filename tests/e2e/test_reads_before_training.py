"""Data that a training function reads before it trains, in runs that resume within an epoch."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import Result, RunConfig

ROWS, EPOCHS = 48, 2
DEFAULTS = {"by": "loader", "reads": "", "strategy": "ddp", "dies": False}


def train(config: dict[str, Any]) -> None:
    """Reports each step; rank 1 is killed in the middle of the second epoch."""
    import os
    import signal

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain import get_context, get_dataset_shard
    from polytrain.torch import TrainingState, prepare_data_loader, prepare_model

    torch.manual_seed(0)
    x = torch.arange(float(ROWS))[:, None]
    if config["by"] == "loader":
        batches: Any = prepare_data_loader(DataLoader(TensorDataset(x), 8, shuffle=True))
    else:
        batches = get_dataset_shard("train").iter_torch_batches(batch_size=8)

    def read(what: str) -> Any:
        if what == "all":
            return sum(1 for _ in batches)
        return what and next(held := iter(batches)), what == "held batch" and held

    first = read(config["reads"])
    model = prepare_model(torch.nn.Linear(1, 1), parallel_strategy=config["strategy"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001, momentum=0.9)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    assert first
    steps, context = done.get("steps", 0), get_context()
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in batches:
            rows = batch["x"].reshape(-1, 1) if isinstance(batch, dict) else batch[0]
            optimizer.zero_grad()
            (model(rows.float()) - 1).square().mean().backward()
            optimizer.step()
            steps += 1
            own = {"rows": rows.flatten().tolist()}
            state.report(own, epoch=epoch, steps=steps)
            dies = config["dies"] and context.get_attempt() == 0 and context.get_world_rank() == 1
            if dies and steps == 5:
                os.kill(os.getpid(), signal.SIGKILL)


def fit(quiet: RunConfig, name: str, **config: Any) -> Result:
    chosen = DEFAULTS | config
    data = {"train": {"x": [float(row) for row in range(ROWS)]}}
    return torch_runs.fit(quiet, train, chosen, datasets=data, name=name, show_output="none")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("by", "reads", "strategy"),
    [
        ("loader", "first batch", "ddp"),
        ("shard", "held batch", "ddp"),
        # Loading its optimizer's state takes a step.
        only_in_sweep("shard", "first batch", "fsdp"),
    ],
)
def test_a_look_at_the_first_batch_changes_nothing_after_a_restart(
    quiet: RunConfig, by: str, reads: str, strategy: str
) -> None:
    chosen = {"by": by, "reads": reads, "strategy": strategy}
    undisturbed, killed = (fit(quiet, str(dies), **chosen, dies=dies) for dies in (False, True))
    assert (undisturbed.restarts, killed.restarts) == (0, 1)
    assert killed.history == undisturbed.history
    assert equal(killed.load_model(), undisturbed.load_model())


def test_a_whole_pass_before_the_training_is_warned_of(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "'data loader 0' was read before the training, and is trained on now"
    for reads, count in (("all", 1), ("first batch", 0)):
        torch_runs.fit(quiet, train, DEFAULTS | {"reads": reads}, name=reads)
        assert "".join(capfd.readouterr()).count(said) == count
