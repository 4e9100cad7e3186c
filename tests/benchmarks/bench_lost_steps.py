"""How many steps random kills cost: none, if a survivor has kept the last one.

Worker processes are killed at random moments, again and again, until the run has had so many
failures. Each rank notes each step that it has taken, in a file: a step that the next attempt takes
again was lost. With `hvd.elastic` it notes those that it has committed. At the end the weights have
to be those of a run without a kill, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer

WEIGHTS = "weights.pt"
"""File for the weights of a library that leaves no checkpoint of its own."""

ALL = ("shared", "gloo", "accelerate", "transformers", "lightning", "elastic", "keras")
"""What trains: torch with sums in shared memory or by gloo, or a library."""

LONGEST_S = (0.3, 3.0)
"""Seconds from a first step to a kill, at most; Keras's first batches take longer than others."""


def train(config: dict[str, Any]) -> None:
    """BatchNorm and dropout; steps of some milliseconds."""
    import os
    import time

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch

    class Count:
        """The number of steps, as a part of the state."""

        steps = 0

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    torch.manual_seed(0)
    width = config["width"]
    inner = torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    )
    chosen = {"process_group": dist.group.WORLD} if config["by"] == "gloo" else {}
    model = polytrain_torch.prepare_model(inner, parallel_strategy_kwargs=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64 * config["batches"], 8)
    loader = polytrain_torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=32, shuffle=True)
    )
    polytrain_torch.seed_everything(7)
    count = Count()
    parts = {"model": model, "optimizer": optimizer, "count": count}
    state = polytrain_torch.TrainingState(**parts)
    done = state.restore()
    context = polytrain.get_context()
    me = context.get_attempt(), context.get_world_rank()
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str) -> None:
        line = f"{event} {me[0]} {me[1]} {count.steps} {time.time()} {os.getpid()}\n"
        os.write(log, line.encode())

    note("begins")
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        for x, y in loader:
            loss = (model(x)[:, 0] - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count.steps += 1
            note("step")
        state.report({"steps": count.steps}, epoch=epoch + 1)


def train_transformers(config: dict[str, Any]) -> None:
    """The same network and steps by a `Trainer`, which logs, evaluates and saves now and then."""
    import os
    import time

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import polytrain
    from polytrain_torch.transformers import prepare_trainer

    class Regression(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, width),
                torch.nn.BatchNorm1d(width),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(width, width),
                torch.nn.Tanh(),
                torch.nn.Linear(width, 1),
            )

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self.layers(x)[:, 0]
            return {"loss": (found - labels).square().mean(), "logits": found}

    context = polytrain.get_context()
    me = context.get_attempt(), context.get_world_rank()
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    class Notes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.note("begins", state.global_step)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.note("step", state.global_step + 1)

        def note(self, event: str, steps: int) -> None:
            line = f"{event} {me[0]} {me[1]} {steps} {time.time()} {os.getpid()}\n"
            os.write(log, line.encode())

    x = torch.randn(64 * config["batches"], 8, generator=torch.Generator().manual_seed(0))
    rows = [{"x": each, "labels": each.sum()} for each in x]
    torch.manual_seed(0)
    trainer = Trainer(
        model=Regression(config["width"]),
        args=TrainingArguments(
            output_dir=config["output"],
            num_train_epochs=config["epochs"],
            per_device_train_batch_size=32,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=40,
            save_steps=config["batches"],
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows[:320],
        callbacks=[Notes()],
    )
    prepare_trainer(trainer).train()


def train_accelerate(config: dict[str, Any]) -> None:
    """The same network and steps by Accelerate, with a loader that it prepares."""
    import os
    import time

    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.accelerate import report, restore

    class Count:
        """The number of steps, as a part of the state."""

        steps = 0

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    torch.manual_seed(0)
    width = config["width"]
    inner = torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    )
    x = torch.randn(64 * config["batches"], 8)
    accelerator, count = Accelerator(), Count()
    accelerator.register_for_checkpointing(count)
    model, optimizer, loader = accelerator.prepare(
        inner,
        torch.optim.AdamW(inner.parameters(), lr=1e-3),
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=32, shuffle=True),
    )
    context = polytrain.get_context()
    me = context.get_attempt(), context.get_world_rank()
    torch.manual_seed(me[1])
    done = restore(accelerator)
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str) -> None:
        line = f"{event} {me[0]} {me[1]} {count.steps} {time.time()} {os.getpid()}\n"
        os.write(log, line.encode())

    note("begins")
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        for x, y in loader:
            loss = (model(x)[:, 0] - y).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            count.steps += 1
            note("step")
        report(accelerator, {"steps": count.steps}, epoch=epoch + 1)


def train_elastic(config: dict[str, Any]) -> None:
    """The same network by `hvd.elastic`, which notes the steps that it has committed."""
    import os
    import time

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch.horovod as hvd

    hvd.init()
    torch.manual_seed(0)
    width = config["width"]
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    )
    x = torch.randn(64 * config["batches"], 8)
    sampler = hvd.elastic.ElasticSampler(x)
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=32, sampler=sampler)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    context = polytrain.get_context()
    me = context.get_attempt(), context.get_world_rank()
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str) -> None:
        line = f"{event} {me[0]} {me[1]} {state.steps} {time.time()} {os.getpid()}\n"
        os.write(log, line.encode())

    @hvd.elastic.run
    def train(state: Any) -> None:
        note("begins")
        while state.epoch < config["epochs"]:
            # Torch's loader would draw a number of the training's.
            loader.generator = torch.Generator()
            for number, (x, y) in enumerate(loader):
                loss = (model(x)[:, 0] - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, len(x))
                state.steps += 1
                if state.steps % 10 == 0:
                    state.commit()
                    note("step")
            state.epoch += 1
            sampler.set_epoch(state.epoch)
        state.commit()

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, steps=0
    )
    train(state)


def train_lightning(config: dict[str, Any]) -> None:
    """The same network and steps by Lightning's trainer, which validates after each epoch."""
    import os
    import time
    from pathlib import Path

    import lightning
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    class Regression(lightning.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, width),
                torch.nn.BatchNorm1d(width),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(width, width),
                torch.nn.Tanh(),
                torch.nn.Linear(width, 1),
            )

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = (self.layers(x)[:, 0] - y).square().mean()
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    context = polytrain.get_context()
    me = context.get_attempt(), context.get_world_rank()
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str, steps: int) -> None:
        line = f"{event} {me[0]} {me[1]} {steps} {time.time()} {os.getpid()}\n"
        os.write(log, line.encode())

    class Begins(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            note("begins", trainer.global_step)

    register_optimizer_step_post_hook(
        lambda *_: note("step", trainer.fit_loop.epoch_loop.batch_progress.total.ready)
    )
    lightning.seed_everything(1, verbose=False)
    x = torch.randn(64 * config["batches"], 8)
    rows = TensorDataset(x, x.sum(1))
    module = Regression(config["width"])
    trainer = Trainer(
        default_root_dir=config["output"],
        max_epochs=config["epochs"],
        callbacks=[Begins()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(rows, batch_size=32, shuffle=True),
        DataLoader(TensorDataset(*rows[:320]), batch_size=32),
    )
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), Path(config["output"], WEIGHTS))


def keras_options(config: dict[str, Any]) -> dict[str, Any]:
    """A `fit` from options, of a network and data like those above."""

    def model() -> Any:
        import os
        import time

        import keras

        import polytrain

        keras.utils.set_random_seed(0)
        width = config["width"]
        network = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(width),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(width, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        context = polytrain.get_context()
        me = context.get_attempt(), context.get_world_rank()
        log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        own, strategy = network.make_train_function, network.distribute_strategy
        noted: list[int] = []

        def note(event: str) -> None:
            local = strategy.experimental_local_results(network.optimizer.iterations.value)
            noted.append(int(local[0].numpy()))
            line = f"{event} {me[0]} {me[1]} {noted[-1]} {time.time()} {os.getpid()}\n"
            os.write(log, line.encode())

        def make(force: bool = False) -> None:
            own(force)
            step = network.train_function

            def train(iterator: Any) -> Any:
                if not noted:
                    note("begins")
                outputs = step(iterator)
                note("step")
                return outputs

            network.train_function = train

        network.make_train_function = make
        return network

    x = np.random.default_rng(0).normal(size=(64 * config["batches"], 8)).astype("float32")
    return {
        "model": model,
        "compile": {"optimizer": "adamw", "loss": "mse", "metrics": ["mae"]},
        "epochs": config["epochs"],
        "label": "y",
        "batch_size": 32,
        "datasets": {"train": {"x": x, "y": x.sum(1)}},
    }


class Killer(threading.Thread):
    """Kills a random rank at random moments, once in each attempt."""

    def __init__(self, log: Path, kills: int, seed: int, longest_s: float) -> None:
        super().__init__(daemon=True)
        self.log, self.left, self.longest_s = log, kills, longest_s
        self.random = random.Random(seed)
        self.killed: dict[int, float] = {}

    def run(self) -> None:
        attempt = 0
        while self.left:
            time.sleep(0.005)
            begun = [line for line in lines(self.log) if line[0] == "step" and line[1] == attempt]
            if not begun:
                continue
            time.sleep(self.random.random() * self.longest_s)
            rank = self.random.randrange(2)
            pids = {line[2]: line[5] for line in lines(self.log) if line[1] == attempt}
            self.killed[attempt] = time.time()
            try:
                os.kill(pids[rank], signal.SIGKILL)
            except (KeyError, ProcessLookupError):
                return
            self.left -= 1
            attempt += 1


def lines(log: Path) -> list[tuple[str, int, int, int, float, int]]:
    if not log.exists():
        return []
    found = []
    for line in log.read_text().splitlines():
        event, attempt, rank, steps, at, pid = line.split()
        found.append((event, int(attempt), int(rank), int(steps), float(at), int(pid)))
    return found


def fit(directory: Path, by: str, width: int, epochs: int, batches: int) -> Result:
    config = {
        "by": by,
        "width": width,
        "epochs": epochs,
        "batches": batches,
        "log": str(directory / "steps"),
        "output": str(directory / "output"),
    }
    (directory / "output").mkdir()
    functions = {
        "accelerate": train_accelerate,
        "transformers": train_transformers,
        "lightning": train_lightning,
        "elastic": train_elastic,
    }
    options: dict[str, Any] = (
        keras_options(config)
        if by == "keras"
        else {"train_loop_per_worker": functions.get(by, train), "train_loop_config": config}
    )
    return make_trainer(
        "tensorflow" if by == "keras" else "torch",
        **options,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=directory,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()


def weights(result: Result, directory: Path) -> bytes:
    if (own := directory / "output" / WEIGHTS).exists():
        found = torch.load(own, weights_only=True).values()
    else:
        assert result.checkpoint is not None
        file = Path(result.checkpoint.path, "model.safetensors")
        found = load_file(file).values() if file.exists() else values(result.load_model())
    return b"".join(np.asarray(each).tobytes() for each in found)


def values(model: Any) -> Any:
    """Return the values of a state of torch's, or of a Keras model."""
    return model.values() if isinstance(model, dict) else model.variables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--by", default="shared,gloo,accelerate,transformers,lightning,elastic,keras"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--longest-s", type=float, help="from a first step to a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = arguments.width, arguments.epochs, arguments.batches
    for by in arguments.by.split(","):
        with tempfile.TemporaryDirectory() as there:
            undisturbed, killed = Path(there, "undisturbed"), Path(there, "killed")
            for each in (undisturbed, killed):
                each.mkdir()
            expected = weights(fit(undisturbed, by, *sizes), undisturbed)
            longest_s = arguments.longest_s or LONGEST_S[by == "keras"]
            killer = Killer(killed / "steps", arguments.kills, arguments.seed, longest_s)
            killer.start()
            result = fit(killed, by, *sizes)
            found = lines(killed / "steps")
            lost, times, reasons = [], [], []
            for attempt, at in killer.killed.items():
                last = max(line[3] for line in found if line[1] == attempt)
                again = [line for line in found if line[1] == attempt + 1]
                begun = [line[3] for line in again if line[0] == "begins"]
                if not begun:
                    continue
                lost.append(max(0, last - begun[0]))
                new = [line[4] for line in again if line[3] > last]
                times += [min(new) - at] if new else []
            for line in Path(result.path, "journal.jsonl").read_text().splitlines():
                entry = json.loads(line)
                if entry["event"] == "SurvivorsAsked" and entry["reason"]:
                    reasons.append(entry["reason"])
            is_equal = weights(result, killed) == expected
            print(
                f"{by}: {result.restarts} kills, {sum(lost)} steps lost in "
                f"{sum(each > 0 for each in lost)} of them (at most {max(lost, default=0)}), "
                f"weights {'equal' if is_equal else 'DIFFER'}; "
                f"kill to new step: {statistics.median(times):.2f} s (median), "
                f"{max(times):.2f} s (longest)"
            )
            for reason in sorted(set(reasons)):
                print(f"  {reasons.count(reason)} times: {reason}")


if __name__ == "__main__":
    main()
