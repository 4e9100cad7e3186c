"""What virtual workers promise, row by row, for a run that is killed and resumed at other sizes.

All rows train in one run, each with models of its own on the same batches. Other rows are held
elsewhere: `torch.compile` in `test_virtual_compiled`, losses of single ranks in
`test_virtual_workers`, and errors (SyncBatchNorm) and warnings in
`tests/plugin_torch/test_virtual_workers`.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e.test_virtual_workers import fit
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset

from polytrain import Result, TrainingFailedError, get_context
from polytrain_torch import TrainingState, micro_batches, prepare_data_loader, prepare_model
from polytrain_torch.checkpoints.rank_parts import digest

WIDTH, CLASSES = 16, 3
EPOCHS, BATCHES, ROWS = 2, 4, 59
"""The last batch of an epoch is uneven: four virtual workers have three or two rows each."""


class Augmented(Dataset[Any]):
    """Flips and noise of all three kinds, drawn in the loader's processes; one row overflows."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, item: int) -> Any:
        x = torch.linspace(-1, 1, WIDTH) * (1 + item % 5)
        x = x.flip(0) if random.random() < 0.5 else x
        noise = 0.1 * torch.randn(WIDTH) + float(np.random.uniform(0.0, 0.1))
        return x + noise, item % CLASSES, float("inf") if item == 7 else 1.0


class Row:
    """One thing that is promised: its parts, and a step."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.model = self.add("model", prepare_model(self.network()))
        self.optimizer = self.add("optimizer", self.made_optimizer())
        self.set_up()

    def network(self) -> torch.nn.Module:
        return torch.nn.Linear(WIDTH, CLASSES)

    def made_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), 0.01)

    def set_up(self) -> None: ...

    def add(self, name: str, part: Any) -> Any:
        self.parts[name] = part
        return part

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), y)

    def step(self, batch: Any, number: int) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        for x, y, _ in micro_batches(batch):
            loss = self.loss(x, y)
            loss.backward()
        more = self.before_step()
        self.optimizer.step()
        self.after_step(loss)
        return {"loss": loss.item(), **more}

    def before_step(self) -> Mapping[str, Any]:
        return {}

    def after_step(self, loss: torch.Tensor) -> None: ...


class RandomNumbers(Row):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 1 + random.random() + float(np.random.rand())
        return super().loss(x * scale + torch.randn_like(x), y)

    def before_step(self) -> Mapping[str, Any]:
        return {"draws": str((torch.rand(()).item(), np.random.rand(), random.random()))}


class Dropout(Row):
    def network(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Dropout(0.4), super().network())


class Residual(torch.nn.Module):
    """A micro-batch skips each layer at random: then it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = x + torch.relu(layer(x))
        return self.last(x)


class StochasticDepth(Row):
    def network(self) -> torch.nn.Module:
        return Residual()


class BatchNorm(Row):
    def network(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), super().network())


class BufferByHand(Row):
    def set_up(self) -> None:
        self.model.module.register_buffer("largest", torch.zeros(()))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.model.module.largest += x.max()
        return super().loss(x / (1 + self.model.module.largest), y)


class Clipping(Row):
    def before_step(self) -> Mapping[str, Any]:
        return {"norm": torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1).item()}


class Accumulation(Row):
    """Steps after every second batch; in between, a checkpoint has no gradients."""

    def step(self, batch: Any, number: int) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        for _ in range(2):
            for x, y, _ in micro_batches(batch):
                loss = self.loss(x + 0.1 * torch.randn_like(x), y) / 2
                loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


class MixedPrecision(Row):
    """A row overflows: it is one virtual worker's, and all skip the step."""

    def set_up(self) -> None:
        self.scaler = self.add(
            "scaler", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        )

    def step(self, batch: Any, number: int) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        for x, y, scale in micro_batches(batch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.loss(x, y)
            self.scaler.scale(loss * scale.float().amax()).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"loss": loss.item(), "norm": str(norm.item()), "scale": self.scaler.get_scale()}


class Averages(Row):
    """By torch, and by hand."""

    def set_up(self) -> None:
        inner = self.model.module
        self.averaged = self.add("averaged", swa_utils.AveragedModel(inner))
        self.ema = self.add("ema", torch.nn.Linear(WIDTH, CLASSES))
        self.ema.load_state_dict(inner.state_dict())

    def after_step(self, loss: torch.Tensor) -> None:
        self.averaged.update_parameters(self.model.module)
        for mine, its in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(its.data, alpha=0.1)


class Schedulers(Row):
    def set_up(self) -> None:
        self.cosine = self.add(
            "cosine", lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=3)
        )
        self.plateau = self.add(
            "plateau", lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        )

    def after_step(self, loss: torch.Tensor) -> None:
        self.cosine.step()
        # A micro-batch's loss isn't the same on all ranks.
        with torch.no_grad():
            self.plateau.step(self.model.module(torch.ones(1, WIDTH)).square().mean())


class SeveralModels(Row):
    """A critic in each step, and a generator in every second one."""

    def set_up(self) -> None:
        self.generator = self.add("generator", prepare_model(torch.nn.Linear(4, WIDTH)))
        self.of_generator = self.add(
            "of_generator", torch.optim.RMSprop(self.generator.parameters(), 0.01)
        )

    def step(self, batch: Any, number: int) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        for x, _, _ in micro_batches(batch):
            fake = self.generator(torch.randn(len(x), 4)).detach()
            loss = self.model(fake).mean() - self.model(x).mean()
            loss.backward()
        self.optimizer.step()
        if number % 2:
            self.of_generator.zero_grad()
            for x, _, _ in micro_batches(batch):
                (-self.model(self.generator(torch.randn(len(x), 4))).mean()).backward()
            self.of_generator.step()
        return {"loss": loss.item()}


class Rare(torch.nn.Module):
    """A layer for some micro-batches, and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.never = (torch.nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor, is_rare: bool) -> torch.Tensor:
        return self.always(x) + (self.rare(x) if is_rare else 0)


class UnusedParameters(Row):
    def network(self) -> torch.nn.Module:
        return Rare()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x, bool(y[0] == 1)), y)


TABLE: dict[str, Callable[[], Row]] = {
    "random_numbers": RandomNumbers,
    "dropout": Dropout,
    "stochastic_depth": StochasticDepth,
    "batch_norm": BatchNorm,
    "buffer_by_hand": BufferByHand,
    "clipping_by_norm": Clipping,
    "accumulation": Accumulation,
    "mixed_precision": MixedPrecision,
    "averages": Averages,
    "schedulers": Schedulers,
    "several_models": SeveralModels,
    "unused_parameters": UnusedParameters,
}


def train(config: Mapping[str, Any]) -> None:
    """Train all rows; rank 0 dies in the step that a file says, before it reports it."""
    torch.manual_seed(1)
    rows = {name: make() for name, make in TABLE.items()}
    state = TrainingState(
        **{f"{row}_{name}": part for row, its in rows.items() for name, part in its.parts.items()}
    )
    done = state.restore()
    step, end = done.get("step", 0), int(Path(config["end"]).read_text())
    loader = prepare_data_loader(DataLoader(Augmented(), 4, shuffle=True, num_workers=1))
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in loader:
            step += 1
            metrics: dict[str, Any] = {}
            for micro in micro_batches(batch):
                seen = digest(micro).hex()
            metrics["augmentation seen"] = seen
            for row, its in rows.items():
                found = its.step(batch, step)
                states = [part.state_dict() for part in its.parts.values()]
                metrics |= {f"{row} {name}": value for name, value in found.items()}
                metrics[f"{row} states"] = digest(states).hex()
            if step == end and get_context().get_world_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            state.report(metrics, step=step, epoch=epoch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Result]:
    """A run of one worker, and one that is killed on four and on two workers, and ends on three."""
    path = tmp_path_factory.mktemp("table")
    whole = fit(path / "whole", 1, function=train)
    for workers, end in ((4, 3), (2, 6)):
        with pytest.raises(TrainingFailedError, match="SIGKILL"):
            fit(path / "cut", workers, end=end, function=train)
    return whole, fit(path / "cut", 3, function=train)


@pytest.mark.parametrize("row", ["augmentation", *TABLE])
def test_a_run_that_is_killed_to_other_sizes_has_the_same_bits(
    runs: tuple[Result, Result], row: str
) -> None:
    whole, cut = (
        [{name: each[name] for name in each if name.startswith(f"{row} ")} for each in run.history]
        for run in runs
    )
    assert len(whole) == EPOCHS * BATCHES
    assert all(whole)
    assert cut == whole


def test_both_runs_are_exact_as_far_as_is_known(runs: tuple[Result, Result]) -> None:
    assert [run.why_not_exact for run in runs] == [(), ()]
