"""Shards that ranks have saved, resumed after a kill, and then by a different number of workers.

A first run is killed once and resumes on its two workers. A second run resumes from its last
checkpoint on one or three. The weights at the end are compared with plain torch's in one process,
whose batches have the rows of all workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.sweeps import only_in_sweep

from polytrain import Checkpoint, CheckpointConfig, Result, RunConfig

ROWS, BATCH, EPOCHS = 48, 12, 4
DIES_AFTER = 6
"""Batches after which the first run is killed: in the middle of an epoch."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    # Seven don't divide by the number of workers.
    return torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def rows() -> torch.utils.data.TensorDataset:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1))


def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x)[:, 0] - y).square().mean()


def optimizer(parameters: Any, *, is_zero: bool) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if is_zero:
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)
    return torch.optim.Adam(parameters, lr=0.01)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5)


def train(config: dict[str, Any]) -> None:
    import os
    import signal

    import torch

    import polytrain

    context = polytrain.get_context()
    batches = BATCH // context.get_world_size()
    steps = 0

    def step_begins() -> None:
        nonlocal steps
        if config["dies"] and context.get_attempt() == 0 and steps == DIES_AFTER:
            polytrain.get_checkpoint()  # It waits for the commit.
            torch.distributed.barrier()
            if context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    libraries = {
        "TrainingState": with_training_state,
        "Lightning": with_lightning,
        "Accelerate": with_accelerate,
    }
    weights = libraries[config["library"]](config, batches, step_begins)
    if context.get_world_rank() == 0:
        torch.save(weights, config["weights"])
    polytrain.report({"steps": steps})


def with_training_state(config: Any, batch: int, step_begins: Any) -> Any:
    from polytrain_torch import TrainingState, prepare_data_loader, prepare_model

    wrapped = prepare_model(model())
    adam = optimizer(wrapped.parameters(), is_zero=True)
    steps = schedule(adam)
    loader = prepare_data_loader(torch.utils.data.DataLoader(rows(), batch_size=batch))
    state = TrainingState(model=wrapped, optimizer=adam, schedule=steps)
    done = state.restore()
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        for number, (x, y) in enumerate(loader):
            step_begins()
            adam.zero_grad()
            loss(wrapped, x, y).backward()
            adam.step()
            steps.step()
            if number == 0:
                state.report({}, epoch=epoch)
        state.report({}, epoch=epoch + 1)
    return wrapped.module.state_dict()


def with_lightning(config: Any, batch: int, step_begins: Any) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from polytrain_torch.lightning import Trainer

    is_zero = config["saves"] == "zero"

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def configure_model(self) -> None:
            # Lightning calls it twice.
            if not is_zero and not isinstance(self.layers, FSDPModule):
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            step_begins()
            return loss(self.layers, *batch)

        def configure_optimizers(self) -> Any:
            adam = optimizer(self.parameters(), is_zero=is_zero)
            return [adam], [{"scheduler": schedule(adam), "interval": "step"}]

    strategy: Any = "ddp"
    if not is_zero:
        strategy = ModelParallelStrategy(save_distributed_checkpoint=config["saves"] == "shards")
    trainer = Trainer(
        max_epochs=config["epochs"],
        default_root_dir=config["output"],
        callbacks=[ModelCheckpoint(every_n_train_steps=5), ModelCheckpoint(every_n_epochs=1)],
        logger=False,
        enable_model_summary=False,
        strategy=strategy,
    )
    module = Regression()
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=batch))
    return get_model_state_dict(module.layers, options=StateDictOptions(full_state_dict=True))


def with_accelerate(config: Any, batch: int, step_begins: Any) -> Any:
    from accelerate import Accelerator, DistributedType
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from polytrain_torch.accelerate import report, restore

    kind = {"shards": "SHARDED_STATE_DICT", "whole": "FULL_STATE_DICT"}[config["saves"]]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator()
    # On CPUs Accelerate would ignore the plugin. What it saves and loads is the same there.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    inner = model()
    wrapped, adam, loader = accelerator.prepare(
        inner,
        optimizer(inner.parameters(), is_zero=False),
        torch.utils.data.DataLoader(rows(), batch_size=batch),
    )
    steps = schedule(adam.optimizer)
    accelerator.register_for_checkpointing(steps)
    done = restore(accelerator)
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        for x, y in loader:
            step_begins()
            adam.zero_grad()
            accelerator.backward(loss(wrapped, x, y))
            adam.step()
            steps.step()
        report(accelerator, {}, epoch=epoch + 1)
    return accelerator.get_state_dict(wrapped)


def weights_of_plain_torch() -> dict[str, torch.Tensor]:
    alone = model()
    adam = optimizer(alone.parameters(), is_zero=False)
    steps = schedule(adam)
    for _ in range(EPOCHS):
        for x, y in torch.utils.data.DataLoader(rows(), batch_size=BATCH):
            adam.zero_grad()
            loss(alone, x, y).backward()
            adam.step()
            steps.step()
    weights: dict[str, torch.Tensor] = alone.state_dict()
    return weights


LIBRARIES = ("lightning", "polytrain_torch.lightning", "polytrain_torch.accelerate")


# `make test` has `plugin_torch/test_library_shards` for Lightning and Accelerate, and for torch
# `test_torch_state` and `plugin_torch/test_state`.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("library", "saves", "workers", "written_by"),
    [
        only_in_sweep("TrainingState", "zero", 3, "rank_0"),
        only_in_sweep("TrainingState", "zero", 1, "every_rank"),
        only_in_sweep("Lightning", "shards", 1, "every_rank"),
        only_in_sweep("Lightning", "shards", 3, "rank_0"),
        only_in_sweep("Lightning", "whole", 3, "rank_0"),
        only_in_sweep("Lightning", "zero", 3, "every_rank"),
        only_in_sweep("Accelerate", "shards", 3, "every_rank"),
        only_in_sweep("Accelerate", "shards", 1, "rank_0"),
        only_in_sweep("Accelerate", "whole", 3, "rank_0"),
    ],
)
def test_shards_are_resumed_on_any_number_of_workers(
    quiet: RunConfig, tmp_path: Path, library: str, saves: str, workers: int, written_by: Any
) -> None:
    def run(name: str, workers: int, epochs: int, start: Checkpoint | None = None) -> Result:
        config = {
            "library": library,
            "saves": saves,
            "dies": start is None,
            "epochs": epochs,
            "output": str(tmp_path / name),
            "weights": str(tmp_path / "weights.pt"),
        }
        return torch_runs.fit(
            quiet,
            train,
            config,
            workers=workers,
            libraries=LIBRARIES if library != "TrainingState" else (),
            restore_from=start,
            checkpoint_config=CheckpointConfig(written_by=written_by),
        )

    killed = run("first", 2, EPOCHS // 2)
    assert killed.restarts == 1
    # Eight steps in all, of which the second attempt does those after the last checkpoint.
    assert killed.metrics["steps"] == (4 if library == "Accelerate" else 3)
    resumed = run("second", workers, EPOCHS, killed.checkpoint)
    assert resumed.metrics["steps"] == 8
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, tensor in weights_of_plain_torch().items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
