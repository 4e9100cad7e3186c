"""Wherever in Lightning's loop a rank is lost, no step of its optimizer is repeated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.journals import journal
from tests.e2e.torch_runs import equal, fit
from tests.sweeps import Selected, only_in_sweep

from polytrain import FailureConfig, Result, RunConfig

STEP = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer",
    "lr_scheduler_step",
    "on_train_batch_end",
    "agreed 1",
)
"""Places of a step, in order. Callbacks of the user come before the state is kept."""

END = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "agreed 2",
    "on_train_epoch_end",
    "agreed 3",
)
"""Places of an epoch's end. "agreed": ranks have agreed whether to stop, after a batch, a
validation, and an epoch."""


def train(config: dict[str, Any]) -> None:
    """In each attempt one rank dies at one place, once the attempt has taken two steps."""
    import os
    import signal
    from pathlib import Path

    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer
    from polytrain_torch.lightning import trainer as of_trainer

    context = polytrain.get_context()
    attempt, rank = context.get_attempt(), context.get_world_rank()
    place, dies = [*config["kills"], ("", -1)][attempt]
    steps = os.open(config["steps"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    taken: list[int] = []

    def at(name: str) -> None:
        if (name, rank) == (place, dies) and len(taken) > 1 and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(*_: Any) -> None:
        taken.append(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        os.write(steps, f"{attempt} {taken[-1]}\n".encode())
        at("optimizer")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(8, 1),
            )

        def training_step(self, batch: Any, index: int) -> Any:
            at("training_step")
            x, y = batch
            loss = (self.layers(x)[:, 0] - y).square().mean()
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            at("lr_scheduler_step")
            super().lr_scheduler_step(scheduler, metric)

    class LogsLater(Regression):
        """Logs the same on all ranks, after the forward pass."""

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.nn.utils.get_total_norm([each.grad for each in self.parameters()])
            self.log("norm", norm, on_step=True, on_epoch=True)

        def on_train_batch_end(self, *_: Any) -> None:
            self.log("rate", self.optimizers().param_groups[0]["lr"])

    def hook(name: str) -> Any:
        return lambda *_, **__: at(name)

    hooks = {name: hook(name) for name in config["places"] if name.startswith("on_")}
    agreements: list[int] = []
    own_agreement = of_trainer.any_rank_stops

    def agree(stops: bool) -> bool:
        agreed = own_agreement(stops)
        agreements.append(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        at(f"agreed {agreements.count(agreements[-1])}")
        return agreed

    of_trainer.any_rank_stops = agree
    register_optimizer_step_post_hook(stepped)
    lightning.seed_everything(1, verbose=False)
    saves = [ModelCheckpoint(every_n_train_steps=2)] if config["saves"] else []
    trainer = Trainer(
        default_root_dir=config["output"],
        callbacks=[type("Dies", (lightning.Callback,), hooks)(), *saves],
        max_epochs=config["epochs"],
        logger=False,
        enable_checkpointing=config["saves"],
        enable_model_summary=False,
        **config["options"],
    )
    x = torch.arange(96.0).reshape(32, 3) / 96
    rows = TensorDataset(x, x.sum(1))
    module = LogsLater() if config["logs_later"] else Regression()
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(*rows[:8]), batch_size=4))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), Path(config["output"], "weights.pt"))


def run(
    output: Path, kills: list[tuple[str, int]], **config: Any
) -> tuple[Result, dict[str, torch.Tensor], list[list[int]]]:
    """Return the result, the weights, and the batches of each attempt in which it stepped."""
    output.mkdir()
    result = fit(
        RunConfig(storage_path=output, progress=False),
        train,
        {
            "kills": kills,
            "places": [*STEP, *END],
            "steps": str(output / "steps"),
            "output": str(output),
            **config,
        },
        libraries=("lightning", "polytrain_torch.lightning"),
        failure_config=FailureConfig(max_failures=-1),
    )
    lines = [line.split() for line in (output / "steps").read_text().splitlines()]
    found = itertools.groupby(sorted({(int(a), int(n)) for a, n in lines}), lambda each: each[0])
    steps = [[batch for _, batch in each] for _, each in found]
    return result, torch.load(output / "weights.pt", weights_only=True), steps


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a step": (STEP, {}),
    "an epoch's end": (END, {}),
    "an accumulation, clipped": (
        STEP,
        {"options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}},
    ),
    "an epoch's end after an accumulation": (END, {"options": {"accumulate_grad_batches": 3}}),
    "validations within epochs": (END, {"options": {"val_check_interval": 2}}),
    "a step that logs later": (STEP, {"logs_later": True}),
    "a step that saves": (STEP, {"saves": True}),
    "an end that saves": (END, {"saves": True}),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [case if case == "an epoch's end" else only_in_sweep(case, id=case) for case in CASES],
)
def test_no_place_of_the_loop_costs_a_step(tmp_path: Path, case: str, selected: Selected) -> None:
    places, chosen = CASES[case]
    # In `make test` one rank is killed at each place, and the other one at the next.
    kills = [
        (place, (number + turn) % 2)
        for turn in selected((1, 0), one_in=2)
        for number, place in enumerate(places)
    ]
    # An attempt may end its second step at the end of an epoch, and then dies in the next one.
    config = {"epochs": 2 * len(kills) + 2, "saves": False, "logs_later": False, "options": {}}
    config |= chosen
    undisturbed, expected, _ = run(tmp_path / "undisturbed", [], **config)
    result, weights, steps = run(tmp_path / "killed", kills, **config)
    assert result.restarts == len(kills)
    # A checkpoint of the training's own may be as new as what a survivor has.
    reasons = {each["reason"] for each in journal(result.path, "SurvivorsAsked")}
    assert {each for each in reasons if not each.endswith("is as new")} == {""}
    repeated = [
        (kills[number], before[-1] - after[0] + 1)
        for number, (before, after) in enumerate(itertools.pairwise(steps))
        if after[0] <= before[-1]
    ]
    assert repeated == []
    assert equal(weights, expected)
    assert result.history == undisturbed.history
