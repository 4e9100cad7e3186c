"""Shards of Lightning and Accelerate that a restart couldn't load fail at the first save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugin_torch.conftest import Run
from torch.utils.data import DataLoader, WeightedRandomSampler

from polytrain import TrainingFailedError


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 1}


class Forgetful(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        # Accelerate itself loads the state of one that has none yet.
        if state_dict["state"]:
            raise KeyError("moments")
        super().load_state_dict(state_dict)


class Lost(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("counts")


PARTS: dict[str, str] = {
    "model": "(?s): .*_extra_state.*needs set_extra_state",
    "optimizer": "Forgetful: .*raised KeyError: 'moments'",
    "schedule": "Lost: .*raised KeyError: 'counts'",
}


def made(part: str | None) -> tuple[Any, Any, Any]:
    """Layers, and the classes of an optimizer and a schedule; a part can't be loaded."""
    kind = Extra if part == "model" else torch.nn.Linear
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), kind(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = Forgetful if part == "optimizer" else torch.optim.SGD
    return layers, optimizer, Lost if part == "schedule" else torch.optim.lr_scheduler.StepLR


X = torch.tensor([[1.0, 2.0], [3.0, 5.0], [2.0, 1.0], [0.0, 1.0]])


def with_lightning(part: str | None, directory: Path, *, in_shards: bool) -> None:
    import lightning
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from polytrain_torch.lightning import Trainer

    layers, optimizer, schedule = made(part)

    class Regression(lightning.LightningModule):
        def __init__(self, words: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = layers

        def configure_model(self) -> None:
            # Lightning calls it twice.
            if not isinstance(self.layers, FSDPModule):
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            sgd = optimizer(self.parameters(), lr=0.1, momentum=0.9)
            return [sgd], [schedule(sgd, 1)]

    module = Regression(Path("words.txt") if part == "a path" else "words.txt")
    strategy = ModelParallelStrategy(save_distributed_checkpoint=in_shards)
    usual: dict[str, Any] = {"logger": False, "enable_model_summary": False, "max_epochs": 2}
    if part is None and in_shards:
        usual["accumulate_grad_batches"] = 2
        usual["callbacks"] = LambdaCallback(
            on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(directory / "within")
        )
    Trainer(default_root_dir=directory, strategy=strategy, **usual).fit(
        module, torch.utils.data.DataLoader(X, batch_size=2)
    )


@pytest.mark.parametrize("in_shards", [True, False])
@pytest.mark.parametrize("part", [*PARTS, "a path", None])
def test_what_lightning_shards_is_read_back(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str | None, in_shards: bool
) -> None:
    def train() -> None:
        with_lightning(part, tmp_path / "lightning", in_shards=in_shards)

    if part is None:
        assert run(train).metrics["epoch"] == 1
        assert ("With ModelParallelStrategy it doesn't have them" in caplog.text) is in_shards
        return
    found = PARTS.get(part, "PosixPath, which isn't plain data")
    with pytest.raises(TrainingFailedError, match=found):
        run(train)


def with_accelerate(part: str | None) -> None:
    from accelerate import Accelerator, DistributedType
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from polytrain_torch.accelerate import report

    layers, optimizer, schedule = made(part)
    accelerator = Accelerator()
    # On CPUs Accelerate would ignore the plugin. What it saves is the same there.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False
    )
    sgd = optimizer(layers.parameters(), lr=0.1, momentum=0.9)
    model, sgd, _ = accelerator.prepare(layers, sgd, schedule(sgd, 1))
    for _ in range(2):
        accelerator.backward(model(X).square().mean())
        sgd.step()
        sgd.zero_grad()
        report(accelerator, {"saved": True})


@pytest.fixture
def forgets_accelerate() -> Iterator[None]:
    """Its state is the process's."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("forgets_accelerate")
@pytest.mark.parametrize("part", [*PARTS, None])
def test_what_accelerate_shards_is_read_back(
    run: Run, monkeypatch: pytest.MonkeyPatch, part: str | None
) -> None:
    # Accelerate sets it.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")

    def train() -> None:
        with_accelerate(part)

    if part is None:
        assert run(train).metrics == {"saved": True}
        return
    with pytest.raises(TrainingFailedError, match=PARTS[part]):
        run(train)


@pytest.mark.usefixtures("forgets_accelerate")
@pytest.mark.parametrize(
    ("options", "is_seedable", "is_drawn_again"),
    [
        ({"shuffle": True}, True, True),
        ({}, True, True),
        ({"shuffle": True}, False, False),
        ({"sampler": WeightedRandomSampler([1.0] * 8, 8)}, True, False),
    ],
)
def test_a_restart_in_mid_epoch_needs_an_order_that_it_can_draw_again(
    options: dict[str, Any], is_seedable: bool, is_drawn_again: bool
) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    from polytrain_torch.transformers.epoch_order import draws_again

    chosen = DataLoaderConfiguration(use_seedable_sampler=is_seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=chosen)
    loader = accelerator.prepare(DataLoader([*range(8)], batch_size=2, **options))
    assert draws_again(loader) == is_drawn_again


@pytest.mark.usefixtures("forgets_accelerate")
def test_a_loader_that_accelerate_has_prepared_may_be_prepared_again(run: Run) -> None:
    def train() -> None:
        from accelerate import Accelerator

        import polytrain
        from polytrain_torch import prepare_data_loader

        loader = Accelerator(cpu=True).prepare(DataLoader([*range(8)], batch_size=3))
        batches = [batch.tolist() for batch in prepare_data_loader(loader)]
        polytrain.report({"batches": batches})

    assert run(train).metrics["batches"] == [[0, 1, 2], [3, 4, 5], [6, 7]]
