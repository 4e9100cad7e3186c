"""DeepSpeed's ZeRO, killed and resumed, also on another number of workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import HUGGING_FACE, equal
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, Result, RunConfig, TrainingFailedError

fit_with_library = partial(torch_runs.fit, libraries=HUGGING_FACE)


def train(config: dict[str, Any]) -> None:
    import os
    import signal

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch import prepare_data_loader, seed_everything
    from polytrain_torch.deepspeed import initialize, report, restore

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": config["stage"]},
        },
    )
    seed_everything(1)
    x = torch.arange(144.0).reshape(48, 3) / 144
    loader = prepare_data_loader(DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True))
    context = polytrain.get_context()
    dies = context.get_world_rank() == 1 and context.get_attempt() == 0
    done = restore(engine)
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        if dies and epoch == config["dies_in"]:
            os.kill(os.getpid(), signal.SIGKILL)
        for x, y in loader:
            loss = (engine(x)[:, 0] - y).square().mean()
            engine.backward(loss)
            engine.step()
        report(engine, {"loss": loss, "steps": engine.global_steps}, epoch=epoch + 1)


def fit(
    quiet: RunConfig, stage: int, *, dies_in: int = -1, epochs: int = 4, **changes: Any
) -> Result:
    config = {"stage": stage, "dies_in": dies_in, "epochs": epochs}
    return fit_with_library(quiet, train, config, **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    from polytrain_torch.deepspeed import load_model

    assert result.checkpoint is not None
    return load_model(result.checkpoint)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stage", "written_by"),
    [only_in_sweep(1, "rank_0"), only_in_sweep(2, "every_rank"), (3, "every_rank")],
)
def test_a_killed_run_ends_in_the_same_weights(
    quiet: RunConfig, stage: int, written_by: Any
) -> None:
    config = CheckpointConfig(written_by=written_by)
    undisturbed = fit(quiet, stage, checkpoint_config=config)
    killed = fit(quiet, stage, dies_in=2, checkpoint_config=config)
    assert killed.restarts == 1
    assert killed.metrics["steps"] == 24
    assert equal(weights(killed), weights(undisturbed))


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [only_in_sweep(1), only_in_sweep(2), 3])
def test_another_number_of_workers_goes_on(quiet: RunConfig, stage: int) -> None:
    """With shards of weights and of Adam's averages as where nothing was sharded."""

    def on_one_worker(stage: int) -> Result:
        half = fit(quiet, stage, epochs=2)
        return fit(quiet, stage, epochs=3, workers=1, restore_from=half.checkpoint)

    unsharded = on_one_worker(0)
    assert unsharded.metrics["steps"] == 2 * 6 + 12
    expected, model = weights(unsharded), weights(on_one_worker(stage))
    assert model.keys() == expected.keys()
    for name, tensor in model.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def saves_what_it_cannot_load(config: dict[str, Any]) -> None:
    import torch

    from polytrain_torch.deepspeed import initialize, report

    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

        if config["part"] != "module":

            def set_extra_state(self, state: Any) -> None:
                """Nothing to keep."""

    class Schedule(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: Any) -> None:
            if config["part"] == "schedule":
                raise KeyError("counts")
            super().load_state_dict(state_dict)

    class Optimizer(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            if config["part"] == "optimizer":
                raise KeyError("moments")
            super().load_state_dict(state_dict)

    model = torch.nn.Sequential(Extra(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = Optimizer(model.parameters(), lr=0.1)
    engine, *_ = initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=Schedule(optimizer, 1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": config["stage"]},
            "zero_allow_untested_optimizer": True,
        },
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 3)).sum())
        report(engine, {"steps": engine.global_steps})
        engine.step()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stage", "part", "message"),
    [
        only_in_sweep(0, "optimizer", "Optimizer: .*raised KeyError: 'moments'"),
        only_in_sweep(0, None, None),
        only_in_sweep(2, "module", "(?s)Sequential: .*_extra_state.*needs set_extra_state"),
        only_in_sweep(2, None, None),
        (3, "module", "(?s)Sequential: .*_extra_state.*needs set_extra_state"),
        only_in_sweep(3, "schedule", "Schedule: .*raised KeyError: 'counts'"),
        only_in_sweep(3, None, None),
    ],
)
def test_what_can_be_saved_and_not_loaded_fails_at_the_first_report(
    quiet: RunConfig,
    capfd: pytest.CaptureFixture[str],
    stage: int,
    part: str | None,
    message: str | None,
) -> None:
    """Also if that is too early."""
    config = {"stage": stage, "part": part}
    if message is None:
        result = fit_with_library(quiet, saves_what_it_cannot_load, config, workers=1)
        assert result.metrics == {"steps": 1}
    else:
        with pytest.raises(TrainingFailedError, match=message):
            fit_with_library(quiet, saves_what_it_cannot_load, config, workers=1)
    warned = "".join(capfd.readouterr())
    assert "A report comes between backward() and the optimizer's step" in warned


def train_apart(config: dict[str, Any]) -> list[Any]:
    """Each rank returns what it ends with."""
    import os
    import signal

    import torch

    import polytrain
    from polytrain_torch.deepspeed import initialize, report, restore

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
    )
    context = polytrain.get_context()
    rank = context.get_world_rank()
    done = restore(engine)
    rows = done.get("rows", 0)
    for epoch in range(done.get("epoch", 0), 4):
        if rank == 1 and context.get_attempt() == 0 and epoch == config["dies_in"]:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.backward(engine(torch.rand(4, 3) + rank).square().sum())
        engine.step()
        rows += rank + 1
        report(engine, {"loss": 0.0}, epoch=epoch + 1, rows=rows)
    return [rows, model[1].running_mean.tolist()]


# `test_accelerate` and `test_torch_rank_states` have such states in `make test`.
@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_what_differs_by_rank_comes_back_to_its_rank(quiet: RunConfig) -> None:
    """Progress, and BatchNorm's statistics."""
    undisturbed = fit_with_library(quiet, train_apart, {"dies_in": -1})
    killed = fit_with_library(quiet, train_apart, {"dies_in": 2})
    assert killed.restarts == 1
    assert killed.return_values == undisturbed.return_values
    assert [each[0] for each in killed.return_values] == [4, 8]
    with pytest.raises(TrainingFailedError, match=r"running_mean.*rows: each of the 2 workers"):
        fit_with_library(
            quiet, train_apart, {"dies_in": -1}, workers=1, restore_from=killed.checkpoint
        )
