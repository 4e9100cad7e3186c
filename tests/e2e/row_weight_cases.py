"""Training functions for `test_row_weights`: one pass over rows through each door of torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import polytrain

RATE = 0.05
Case = tuple[int, int]
"""Rows, and rows in a worker's batch."""


def rows_of(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """A table of this many rows, of which no two are alike."""
    x = np.random.default_rng(number).normal(size=(number, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1) + np.arange(number, dtype=np.float32) % 5}


def model_of(features: int = 3) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(features, 1)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    import torch

    return torch.nn.functional.mse_loss(model(x)[:, 0], y)


def alone(case: Case, workers: int, *, accumulated: int = 1) -> list[float]:
    """Where plain torch ends in one process, with batches of the rows of all workers."""
    import torch

    rows, batch_size = case
    x, y = (torch.tensor(column) for column in rows_of(rows).values())
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = [*zip(x.split(batch_size * workers), y.split(batch_size * workers), strict=True)]
    for first in range(0, len(batches), accumulated):
        optimizer.zero_grad()
        for batch in batches[first : first + accumulated]:
            loss_of(model, *batch).backward()
        optimizer.step()
    return weights_of(model)


def weights_of(model: Any) -> list[float]:
    return [*model.weight[0].tolist(), *model.bias.tolist()]


def train(config: dict[str, Any]) -> None:
    door = DOORS[config["door"]]
    polytrain.report({"weights": [door(rows, size) for rows, size in config["cases"]]})


def loader_of(rows: int, batch_size: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    dataset = TensorDataset(*(torch.tensor(column) for column in rows_of(rows).values()))
    return DataLoader(dataset, batch_size=batch_size)


def prepared(rows: int, batch_size: int) -> Any:
    from polytrain_torch import prepare_data_loader

    return prepare_data_loader(loader_of(rows, batch_size))


def shard_batches(rows: int, **sizes: Any) -> Iterable[Any]:
    shard = polytrain.get_dataset_shard(f"rows {rows}")
    return ((batch["x"], batch["y"]) for batch in shard.iter_torch_batches(**sizes))


def stepped(model: Any, optimizer: Any, batches: Iterable[Any], backward: Any = None) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        if backward is None:
            loss.backward()
        else:
            backward(loss)
        optimizer.step()


def ddp(batches: Iterable[Any], **options: Any) -> list[float]:
    import torch

    from polytrain_torch import prepare_model

    model = model_of()
    parallel = prepare_model(model, **options)
    stepped(parallel, torch.optim.SGD(parallel.parameters(), lr=RATE), batches)
    return weights_of(model)


def with_loader(rows: int, batch_size: int) -> list[float]:
    return ddp(prepared(rows, batch_size))


def with_loader_of_processes(rows: int, batch_size: int) -> list[float]:
    from torch.utils.data import DataLoader

    from polytrain_torch import prepare_data_loader

    dataset = loader_of(rows, batch_size).dataset
    return ddp(prepare_data_loader(DataLoader(dataset, batch_size, num_workers=1)))


def with_compiled_model(rows: int, batch_size: int) -> list[float]:
    import torch

    from polytrain_torch import prepare_model

    model = model_of()
    compiled: Any = torch.compile(prepare_model(model), backend="eager")
    stepped(compiled, torch.optim.SGD(model.parameters(), lr=RATE), prepared(rows, batch_size))
    return weights_of(model)


def with_gloo(rows: int, batch_size: int) -> list[float]:
    import torch.distributed as dist

    group = {"process_group": dist.group.WORLD}
    return ddp(prepared(rows, batch_size), parallel_strategy_kwargs=group)


def with_shard(rows: int, batch_size: int) -> list[float]:
    return ddp(shard_batches(rows, batch_size=batch_size))


def with_global_batches(rows: int, batch_size: int) -> list[float]:
    workers = polytrain.get_context().get_world_size()
    return ddp(shard_batches(rows, global_batch_size=batch_size * workers))


def with_own_weights(rows: int, batch_size: int) -> list[float]:
    """A function that weighs by rows itself isn't weighted once more."""
    import torch

    from polytrain_torch import prepare_model

    model = model_of()
    parallel = prepare_model(model)
    shard = polytrain.get_dataset_shard(f"rows {rows}")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in shard.iter_torch_batches(batch_size=batch_size):
        optimizer.zero_grad()
        (loss_of(parallel, batch["x"], batch["y"]) * shard.gradient_weight).backward()
        optimizer.step()
    return weights_of(model)


def with_fsdp(rows: int, batch_size: int) -> list[float]:
    import torch

    from polytrain_torch import prepare_model

    model = prepare_model(model_of(), parallel_strategy="fsdp")
    batches = prepared(rows, batch_size)
    stepped(model, torch.optim.SGD(model.parameters(), lr=RATE), batches)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return [*whole["weight"][0].tolist(), *whole["bias"].tolist()]


ACCUMULATED = 2


def with_accumulation(rows: int, batch_size: int) -> list[float]:
    """Gradients of two batches are added up, and sent once: only the last batch is weighted."""
    import contextlib

    import torch

    from polytrain_torch import prepare_model

    model = model_of()
    parallel = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = prepared(rows, batch_size)
    for number, (x, y) in enumerate(loader, start=1):
        is_step = number % ACCUMULATED == 0 or number == len(loader)
        with contextlib.nullcontext() if is_step else parallel.no_sync():
            loss_of(parallel, x, y).backward()
        if is_step:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def with_horovod(rows: int, batch_size: int) -> list[float]:
    import torch

    import polytrain_torch.horovod as hvd

    hvd.init()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    stepped(model, optimizer, shard_batches(rows, batch_size=batch_size))
    return weights_of(model)


def with_accelerate(rows: int, batch_size: int) -> list[float]:
    import torch
    from accelerate import Accelerator

    from polytrain_torch.accelerate import restore

    accelerator = Accelerator()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    parallel, optimizer = accelerator.prepare(model, optimizer)
    restore(accelerator)
    batches = shard_batches(rows, batch_size=batch_size)
    stepped(parallel, optimizer, batches, accelerator.backward)
    return weights_of(model)


def lightning_module(*, is_manual: bool) -> Any:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model_of()
            self.automatic_optimization = not is_manual

        def training_step(self, batch: Any, _: int) -> Any:
            if isinstance(batch, dict):
                batch = batch["x"], batch["y"]
            loss = loss_of(self.layer, *batch)
            if is_manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=RATE)

    return Module()


QUIET = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


def with_lightning(rows: int, batch_size: int) -> list[float]:
    from polytrain_torch.lightning import Trainer

    module = lightning_module(is_manual=False)
    Trainer(**QUIET).fit(module, loader_of(rows, batch_size))
    return weights_of(module.layer)


def with_manual_lightning(rows: int, batch_size: int) -> list[float]:
    from polytrain_torch.lightning import Trainer

    module = lightning_module(is_manual=True)
    Trainer(**QUIET).fit(module, loader_of(rows, batch_size))
    return weights_of(module.layer)


def with_lightning_parts(rows: int, batch_size: int) -> list[float]:
    """A `lightning.Trainer` with our strategy, on a shard's batches."""
    import lightning

    from polytrain_torch.lightning.parts import (
        RayDDPStrategy,
        RayLightningEnvironment,
        prepare_trainer,
    )

    module = lightning_module(is_manual=False)
    shard = polytrain.get_dataset_shard(f"rows {rows}")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=polytrain.get_context().get_world_size(),
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        **QUIET,
    )
    batches = shard.iter_torch_batches(batch_size=batch_size)
    prepare_trainer(trainer).fit(module, batches)
    return weights_of(module.layer)


def with_transformers(rows: int, batch_size: int) -> list[float]:
    import tempfile

    import torch
    from transformers import Trainer, TrainingArguments

    from polytrain_torch.transformers import prepare_trainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model_of()

        def forward(self, x: Any, y: Any) -> Any:
            return {"loss": loss_of(self.layer, x, y)}

    model = Model()
    shard = polytrain.get_dataset_shard(f"rows {rows}")
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        per_device_train_batch_size=batch_size,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        weight_decay=0,
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
    )
    batches = shard.iter_torch_batches(batch_size=batch_size)
    prepare_trainer(Trainer(model, arguments, train_dataset=batches)).train()
    return weights_of(model.layer)


def with_keras(rows: int, batch_size: int) -> list[float]:
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    from polytrain_torch.keras import prepare_model

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    weights = [parameter.detach().numpy() for parameter in model_of().parameters()]
    model.set_weights([weights[0].T, weights[1]])
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    shard = polytrain.get_dataset_shard(f"rows {rows}")
    batches = (
        (batch["x"], batch["y"][:, None], np.full(len(batch["y"]), shard.gradient_weight))
        for batch in shard.iter_torch_batches(batch_size=batch_size)
    )
    prepare_model(model).fit(batches, epochs=1, verbose=0)
    return [float(each) for array in model.get_weights() for each in array.ravel()]


DOORS = {
    "prepare_data_loader": with_loader,
    "prepare_data_loader, worker processes": with_loader_of_processes,
    "torch.compile": with_compiled_model,
    "gloo": with_gloo,
    "shard": with_shard,
    "shard, global batches": with_global_batches,
    "shard, weighted by the function": with_own_weights,
    "FSDP2": with_fsdp,
    "accumulated gradients": with_accumulation,
    "Horovod": with_horovod,
    "Accelerate": with_accelerate,
    "Lightning": with_lightning,
    "Lightning, manual": with_manual_lightning,
    "Lightning's own trainer": with_lightning_parts,
    "Transformers": with_transformers,
    "Keras on torch, weights of samples": with_keras,
}
