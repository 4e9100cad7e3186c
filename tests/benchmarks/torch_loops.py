"""The same training by several parties, each with its own words: what bench_torch measures.

Run as a script, it is a worker of a peer that brings its own launcher. Every party takes the same
steps on the same batch, and saves model and optimizer after every so many.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from teams import reported_steps

Config = dict[str, Any]
"""network, and directory (to save in); steps, and every (steps between two checkpoints), of a whole
run; or address (of who tells when to take steps), of one that takes turns."""


def network(name: str) -> Any:
    """A small convolution net, or a small transformer, that tells ten classes apart."""
    import torch
    from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential

    torch.manual_seed(0)
    if name == "conv":
        return Sequential(
            *(Conv2d(1, 16, 3, padding=1), ReLU(), MaxPool2d(2)),
            *(Conv2d(16, 32, 3, padding=1), ReLU(), MaxPool2d(2)),
            *(Flatten(), Linear(32 * 7 * 7, 10)),
        )
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return Sequential(
        *(Flatten(1, 2), torch.nn.Linear(28, 64), torch.nn.TransformerEncoder(layer, 2)),
        *(Flatten(), Linear(28 * 64, 10)),
    )


def batch() -> tuple[Any, Any]:
    """Images and classes."""
    import torch

    return torch.randn(32, 1, 28, 28), torch.randint(10, (32,))


def optimizer_of(model: Any) -> Any:
    """AdamW."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps_of(config: Config) -> Iterator[int]:
    """The numbers of the steps to take, from 1."""
    if "address" in config:
        return reported_steps(config["address"])
    return iter(range(1, config["steps"] + 1))


def is_saved(config: Config, step: int) -> bool:
    """Whether a checkpoint is made after a step."""
    return "every" in config and step % config["every"] == 0


def take_steps(
    config: Config,
    model: Any,
    optimizer: Any,
    *,
    backward: Callable[[Any], None],
    save: Callable[[int, float], None],
) -> None:
    """The loop, where the party leaves it to the user.

    Args:
        config: of the run.
        model: as the party has prepared it.
        optimizer: of its parameters.
        backward: of a loss.
        save: found of a step, and its loss.
    """
    import torch

    images, classes = batch()
    for step in steps_of(config):
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        found = loss.item()
        if is_saved(config, step):
            save(step, found)


def by_polytrain(config: Config) -> None:
    """Ours."""
    from polytrain_torch import TrainingState, prepare_model

    model = prepare_model(network(config["network"]))
    optimizer = optimizer_of(model)
    state = TrainingState(model=model, optimizer=optimizer)
    take_steps(
        config,
        model,
        optimizer,
        backward=lambda loss: loss.backward(),
        save=lambda step, loss: state.report({"loss": loss}, step=step),
    )


def by_ray_train(config: Config) -> None:
    """Ray Train."""
    import ray.train
    import ray.train.torch
    import torch

    model = ray.train.torch.prepare_model(network(config["network"]))
    optimizer = optimizer_of(model)
    is_first = ray.train.get_context().get_world_rank() == 0

    def save(step: int, loss: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if is_first:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states, Path(directory, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(directory)
            ray.train.report({"loss": loss}, checkpoint=checkpoint)

    backward: Callable[[Any], None] = lambda loss: loss.backward()  # noqa: E731
    take_steps(config, model, optimizer, backward=backward, save=save)


def by_torchrun(config: Config) -> None:
    """Plain DDP, started by torchrun."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(network(config["network"]))
    optimizer = optimizer_of(model)

    def save(step: int, loss: float) -> None:
        if dist.get_rank() == 0:
            states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, Path(config["directory"], f"{step}.pt"))

    take_steps(
        config,
        model,
        optimizer,
        backward=lambda loss: loss.backward(),
        save=save,
    )
    dist.destroy_process_group()


def by_accelerate(config: Config) -> None:
    """Accelerate, started by its launcher for CPUs."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = network(config["network"])
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    take_steps(
        config,
        model,
        optimizer,
        backward=accelerator.backward,
        save=lambda step, loss: accelerator.save_state(str(Path(config["directory"], str(step)))),
    )
    accelerator.end_training()


def by_lightning(config: Config) -> None:
    """Lightning, which starts its second worker itself."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    steps = steps_of(config)

    class Steps(Callback):  # type: ignore[misc]  # Lightning's types aren't looked at
        def on_train_start(self, trainer: Any, module: Any) -> None:
            next(steps)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = next(steps, None) is None

    class Module(lightning.LightningModule):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.network = network(config["network"])

        def training_step(self, batch: Any, index: int) -> Any:
            images, classes = batch
            loss = torch.nn.functional.cross_entropy(self.network(images), classes)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    same, saving = batch(), []
    if "every" in config:
        saving = [ModelCheckpoint(config["directory"], every_n_train_steps=config["every"])]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing="every" in config,
        callbacks=[Steps(), *saving],
    )
    loader = torch.utils.data.DataLoader([same] * 1_000_000, batch_size=None)
    trainer.fit(Module(), loader)


def main() -> None:
    """A worker of a peer."""
    party, config = sys.argv[1], json.loads(sys.argv[2])
    if party == "accelerate":
        from accelerate import debug_launcher

        # Its command wants MPI for several processes on CPUs.
        debug_launcher(by_accelerate, args=(config,), num_processes=2)
    else:
        {"torchrun": by_torchrun, "lightning": by_lightning}[party](config)


if __name__ == "__main__":
    main()
