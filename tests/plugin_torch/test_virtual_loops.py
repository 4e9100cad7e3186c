"""Loops as users write them for DDP, with all that they combine: the same bits on any workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.plugin_torch.test_virtual_workers import ROWS, TABLE, WORKERS, in_world
from tests.sweeps import only_in_sweep
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset, TensorDataset

import polytrain
from polytrain_torch import micro_batches, prepare_data_loader, prepare_model
from polytrain_torch.checkpoints.rank_parts import digest

X = torch.as_tensor(np.stack(TABLE["x"].to_numpy()))
Y = torch.as_tensor(TABLE["y"].to_numpy().copy())


class Augmented(Dataset[Any]):
    """Flips and noise, drawn in the loader's processes; one row overflows."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, item: int) -> Any:
        x = X[item].flip(0) if random.random() < 0.5 else X[item]
        scale = float("inf") if item == 77 else 1.0
        return x * float(np.random.uniform(0.9, 1.1)) + 0.1 * torch.randn(64), Y[item], scale


class Residual(torch.nn.Module):
    """Layers that a micro-batch skips at random, for which all of torch and Python may draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.norm, self.last = torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.7:
                x = x + torch.relu(layer(x))
        return self.last(functional.dropout(self.norm(x), 0.1, self.training))


def classifies_images() -> None:
    """Accumulation, AMP with a scaler, clipping, averaged weights, schedules by step and epoch."""
    torch.manual_seed(1)
    model = prepare_model(Residual())
    averaged = swa_utils.AveragedModel(
        model.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    by_epoch = lr_scheduler.MultiStepLR(optimizer, [1], 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    loader = prepare_data_loader(DataLoader(Augmented(), 7, shuffle=True, num_workers=1))
    scales = []
    for _ in range(2):
        for number, batch in enumerate(loader, 1):
            for x, y, scale in micro_batches(batch):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = functional.cross_entropy(model(x), y, label_smoothing=0.1) / 2
                scaler.scale(loss * scale.float().amax()).backward()
            if number % 2 and number < len(loader):
                continue
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
            warmup.step()
            averaged.update_parameters(model.module)
            scales.append(scaler.get_scale())
            polytrain.report({"loss": loss.item(), "norm": str(norm.item())})
        by_epoch.step()
    # The row that overflows is one virtual worker's; all skip the step.
    assert any(after < before for before, after in pairwise(scales))
    states = (model, averaged, optimizer, warmup, by_epoch, scaler)
    polytrain.report({"hash": digest([each.state_dict() for each in states]).hex()})


def trains_adversaries() -> None:
    """The critic steps after each batch, the generator after every third one; one of two losses."""
    torch.manual_seed(2)
    generator = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh()))
    critic = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    )
    of_critic = torch.optim.RMSprop(critic.parameters(), 1e-3)
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9))
    schedule = lr_scheduler.ExponentialLR(of_generator, 0.9)
    loader = prepare_data_loader(DataLoader(TensorDataset(X), 6, shuffle=True))
    for _ in range(2):
        for number, batch in enumerate(loader):
            of_critic.zero_grad()
            for (real,) in micro_batches(batch):
                fake = generator(torch.randn(len(real), 8)).detach()
                at = torch.rand(len(real), 1)
                between = (at * real + (1 - at) * fake).requires_grad_()
                slope = torch.autograd.grad(critic.module(between).sum(), between)[0]
                loss = critic(fake).mean() - critic(real).mean() + slope.square().mean().detach()
                loss.backward()
            of_critic.step()
            if number % 3 == 0:
                of_generator.zero_grad()
                for (real,) in micro_batches(batch):
                    (-critic(generator(torch.randn(len(real), 8))).mean()).backward()
                of_generator.step()
            polytrain.report({"loss": loss.item()})
        schedule.step()
    states = (generator, critic, of_critic, of_generator, schedule)
    polytrain.report({"hash": digest([each.state_dict() for each in states]).hex()})


class Language(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 16, padding_idx=0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return hidden @ self.embedding.weight.T


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def models_language() -> None:
    """Tied weights, padded sequences, gradients by value and norm, a schedule by the loss."""
    torch.manual_seed(3)
    model = prepare_model(Language())
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0}])
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    texts: Any = [torch.randint(1, 12, (int(n),)) for n in torch.randint(3, 9, (90,))]
    loader = prepare_data_loader(DataLoader(texts[:70], 3, shuffle=True, collate_fn=padded))
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            for tokens in micro_batches(batch):
                scores = model(tokens[:, :-1]).flatten(0, 1)
                loss = functional.cross_entropy(scores, tokens[:, 1:].flatten(), ignore_index=0)
                loss.backward()
            torch.nn.utils.clip_grad_value_(decayed, 0.1)
            torch.nn.utils.clip_grad_norm_(chain(decayed, others), 0.5)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            # Not split: each rank computes all of it.
            scores = model(padded(texts[70:])[:, :-1]).flatten(0, 1)
            validated = functional.cross_entropy(scores, padded(texts[70:])[:, 1:].flatten())
        model.train()
        schedule.step(validated)
        polytrain.report({"loss": loss.item(), "validated": validated.item()})
    states = (model, optimizer, schedule)
    polytrain.report({"hash": digest([each.state_dict() for each in states]).hex()})


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(2), 3, only_in_sweep(WORKERS)])
@pytest.mark.parametrize("function", [classifies_images, trains_adversaries, models_language])
def test_a_users_loop_has_the_same_bits(
    function: Callable[[], None], workers: int, tmp_path: Path
) -> None:
    alone = in_world(function, 1, tmp_path)
    assert alone[-1]["hash"]
    assert in_world(function, workers, tmp_path) == alone
