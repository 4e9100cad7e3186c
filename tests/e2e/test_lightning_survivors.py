"""A loss costs Lightning no step: a rank that is left has the state of the last batch.

The module has BatchNorm and dropout and logs means over its epochs. Unless a test says so, it saves
no checkpoint within an epoch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.losses import lose_all_ranks
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, FailureConfig, Result, RunConfig

fit_with_library = partial(torch_runs.fit, libraries=("lightning", "polytrain_torch.lightning"))


def train(config: dict[str, Any]) -> None:
    """Rank `rank` dies at a place of a batch, counted from 1, in the first attempt.

    In the second one, all ranks die at the place `then` of that batch.
    """
    import os
    import signal
    from pathlib import Path

    import lightning
    import torch
    from lightning.pytorch import callbacks as of_lightning
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer
    from polytrain_torch.lightning import trainer as of_trainer

    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and context.get_world_rank() == config["rank"]
    options = dict(config["options"])

    def at(place: str) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if dies and (place, batch) == (config["place"], config["batch"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if context.get_attempt() == 1 and (place, batch) == (config["then"], config["batch"]):
            lose_all_ranks()

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(8, 1),
            )
            self.count = 0
            if config["variant"] == "manual":
                self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            at("forward")
            loss = (self.layers(x)[:, 0] - y).square().mean()
            loss.register_hook(lambda _: at("backward"))
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("alone", loss.detach() * 2)
            self.count += config["variant"] == "counts"
            if config["variant"] == "manual":
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            if not trainer.sanity_checking:
                at("validation")
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            at("epoch")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            match config["scheduler"]:
                case "step" | "epoch" as interval:
                    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
                    return [optimizer], [{"scheduler": scheduler, "interval": interval}]
                case "all steps":
                    steps = trainer.estimated_stepping_batches
                    falling = torch.optim.lr_scheduler.LambdaLR(
                        optimizer, lambda step: 1 - step / steps
                    )
                    return [optimizer], [{"scheduler": falling, "interval": "step"}]
                case "plateau":
                    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                        optimizer, patience=0, threshold=10.0
                    )
                    return [optimizer], [{"scheduler": plateau, "monitor": "error"}]
            return optimizer

    class SavesMore(Regression):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["count"] = self.count

    class Dies(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            at("begin")

        def on_before_optimizer_step(self, *_: Any) -> None:
            at("gradients")

        def on_train_batch_end(self, *_: Any) -> None:
            at("step")

        def on_validation_epoch_end(self, *_: Any) -> None:
            if not trainer.sanity_checking:
                at("validated")

        def on_train_end(self, *_: Any) -> None:
            at("end")

    def stepped(*_: Any) -> None:
        if config["steps"] and context.get_world_rank() != config["rank"]:
            with Path(config["steps"]).open("a") as file:
                file.write(f"{trainer.fit_loop.epoch_loop.batch_progress.total.ready}\n")
        at("optimizer")

    agreements: list[int] = []
    own_agreement = of_trainer.any_rank_stops

    def agree(stops: bool) -> bool:
        """Die when the ranks have agreed at a batch's end, after a validation or an epoch."""
        agreed = own_agreement(stops)
        agreements.append(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        at(f"agreed {agreements.count(agreements[-1])}")
        return agreed

    of_trainer.any_rank_stops = agree
    register_optimizer_step_post_hook(stepped)
    lightning.seed_everything(1, verbose=False)
    chosen: list[Any] = [
        getattr(of_lightning, name)(**arguments)
        for name, arguments in options.pop("callbacks", {}).items()
    ]
    if config["variant"] == "own buffers":
        options["strategy"] = DDPStrategy(broadcast_buffers=False)
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = TensorDataset(x, x.sum(1))
    kind = SavesMore if config["variant"] == "saves more" else Regression
    module = kind()
    options = {"max_epochs": 3, "log_every_n_steps": 1, **options}
    trainer = Trainer(
        default_root_dir=config["output"],
        callbacks=[Dies(), *chosen],
        logger=CSVLogger(config["output"]),
        enable_model_summary=False,
        **options,
    )
    own_save = trainer.strategy.save_checkpoint

    def save_checkpoint(*args: Any, **options: Any) -> None:
        at("save")
        own_save(*args, **options)

    trainer.strategy.save_checkpoint = save_checkpoint
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    if config["variant"] == "looks":
        next(iter(loader))
        for _ in loader:
            break
    trainer.fit(module, loader, DataLoader(rows, batch_size=8))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), Path(config["output"], "weights.pt"))


Weights = dict[str, torch.Tensor]


def fit(
    quiet: RunConfig, output: Path, place: str = "", batch: int = 0, **config: Any
) -> tuple[Result, Weights]:
    chosen = {"place": place, "batch": batch, "rank": 1, "output": str(output), "options": {}}
    chosen |= {"steps": "", "scheduler": "", "variant": "", "then": ""}
    changes = {name: config.pop(name) for name in list(config) if name not in chosen}
    output.mkdir()
    result = fit_with_library(quiet, train, {**chosen, **config}, **changes)
    return result, torch.load(output / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Weights, list[str]]:
    there = tmp_path_factory.mktemp("undisturbed")
    run = RunConfig(storage_path=there / "runs", progress=False)
    return *fit(run, there / "output"), logged(there / "output")


def logged(output: Path) -> list[str]:
    """The rows of its `CSVLogger`."""
    [table] = output.rglob("metrics.csv")
    return table.read_text().splitlines()


# In `make test`, the waits of the rank that is left that are not those of plain torch: for buffers,
# metrics, a file and the end. `test_survivors` has those for gradients and for the next batch.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "batch", "rank"),
    [
        # Rank 1 waits for the buffers, within DDP's forward pass.
        ("begin", 8, 0),
        only_in_sweep("forward", 3, 1),
        only_in_sweep("backward", 4, 0),
        only_in_sweep("gradients", 5, 0),
        only_in_sweep("optimizer", 2, 1),
        only_in_sweep("step", 7, 1),
        ("validation", 6, 0),
        only_in_sweep("validated", 12, 1),
        ("save", 6, 1),
        only_in_sweep("epoch", 12, 0),
        ("end", 18, 1),
    ],
)
def test_no_step_is_repeated(
    quiet: RunConfig,
    tmp_path: Path,
    undisturbed: tuple[Result, Weights, list[str]],
    place: str,
    batch: int,
    rank: int,
) -> None:
    steps = tmp_path / "steps"
    result, weights = fit(quiet, tmp_path / "output", place, batch, rank=rank, steps=str(steps))
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    # Those of the rank that was left, in both attempts.
    taken = sorted(map(int, steps.read_text().split()))
    assert (asked["reason"], taken) == ("", [*range(1, 19)])
    assert equal(weights, undisturbed[1])
    assert result.history == undisturbed[0].history
    assert logged(tmp_path / "output") == undisturbed[2]


STOPS = {"EarlyStopping": {"monitor": "error", "patience": 1, "min_delta": 10.0}}
SAVES = {"ModelCheckpoint": {"every_n_train_steps": 3}}

EXACT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "accumulates": ("backward", 10, {"options": {"accumulate_grad_batches": 4}}),
    "accumulates more later": (
        "backward",
        10,
        {"options": {"callbacks": {"GradientAccumulationScheduler": {"scheduling": {0: 1, 1: 2}}}}},
    ),
    "scheduler by step": ("backward", 9, {"scheduler": "step"}),
    "scheduler over all steps": ("backward", 9, {"scheduler": "all steps"}),
    "scheduler by epoch": ("backward", 9, {"scheduler": "epoch"}),
    "scheduler by error": ("validation", 12, {"scheduler": "plateau"}),
    "own buffers": ("backward", 9, {"variant": "own buffers"}),
    "looks at batches": ("backward", 9, {"variant": "looks"}),
    "stops": ("validation", 12, {"options": {"callbacks": STOPS}}),
    "has stopped": ("end", 12, {"options": {"callbacks": STOPS}}),
    "saves within epochs": ("backward", 9, {"options": {"callbacks": SAVES}}),
    "saves before a validation": ("validation", 6, {"options": {"callbacks": SAVES}}),
    "validates within epochs": (
        "validated",
        10,
        {"options": {"val_check_interval": 2, "callbacks": SAVES}},
    ),
    "few batches": ("backward", 9, {"options": {"limit_train_batches": 4}}),
    "few steps": ("validation", 11, {"options": {"max_steps": 11, "val_check_interval": 1}}),
    "few steps, between epochs": ("forward", 7, {"options": {"max_steps": 11}}),
    "mixed precision": ("backward", 9, {"options": {"precision": "bf16-mixed"}}),
    "clips": ("backward", 9, {"options": {"gradient_clip_val": 0.1}}),
    "own loaders": ("backward", 9, {"options": {"use_distributed_sampler": False}}),
    "reloads": ("backward", 9, {"options": {"reload_dataloaders_every_n_epochs": 1}}),
    "no checkpoints, at a batch's end": (
        "agreed 1",
        9,
        {"options": {"enable_checkpointing": False}},
    ),
    "no checkpoints, after a validation": (
        "agreed 2",
        12,
        {"options": {"enable_checkpointing": False}},
    ),
    "no checkpoints, after an epoch": (
        "agreed 3",
        12,
        {"options": {"enable_checkpointing": False}},
    ),
    "no checkpoints, rank 0 after an epoch": (
        "agreed 3",
        12,
        {"options": {"enable_checkpointing": False}, "rank": 0},
    ),
    "no checkpoints": ("backward", 9, {"options": {"enable_checkpointing": False}}),
    "times": ("backward", 9, {"options": {"callbacks": {"Timer": {"duration": "00:01:00:00"}}}}),
    "shows": (
        "optimizer",
        9,
        {"options": {"callbacks": {"LearningRateMonitor": {}, "DeviceStatsMonitor": {}}}},
    ),
}
"""What a run has beside the above, and where it is killed."""


IN_TEST = {
    "scheduler over all steps",
    "own buffers",
    "reloads",
    "no checkpoints, after an epoch",
}
"""For `make test`: a schedule that asks for the number of steps, a state that differs by rank,
loaders that are replaced in training, and a loss of a rank that only the others have got past."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [case if case in IN_TEST else only_in_sweep(case, id=case) for case in EXACT]
)
def test_what_it_trains_with_is_as_without_the_loss(
    quiet: RunConfig, tmp_path: Path, case: str
) -> None:
    place, batch, config = EXACT[case]
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **config)
    result, weights = fit(quiet, tmp_path / "killed", place, batch, **config)
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert equal(weights, expected)
    assert result.history == undisturbed.history


def test_a_validation_is_made_up_for_that_a_second_loss_cuts(
    quiet: RunConfig, tmp_path: Path
) -> None:
    """The first one cuts the checkpoint before it, which the second attempt saves again."""
    options = {"callbacks": SAVES}
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", options=options)
    result, weights = fit(
        *(quiet, tmp_path / "killed", "save", 6),
        options=options,
        then="validation",
        failure_config=FailureConfig(max_failures=2),
    )
    assert result.restarts == 2
    [handed_on, *others] = [each["reason"] for each in journal(result.path, "SurvivorsAsked")]
    assert handed_on == ""
    assert all(others)
    assert equal(weights, expected)
    assert result.history == undisturbed.history


REFUSED: dict[str, dict[str, Any]] = {
    "optimizes manually": {"variant": "manual"},
    "Regression.count changes": {"variant": "counts"},
    "on_save_checkpoint": {"variant": "saves more"},
    "StochasticWeightAveraging": {
        "options": {"callbacks": {"StochasticWeightAveraging": {"swa_lrs": 0.05}}}
    },
    "EMAWeightAveraging": {"options": {"callbacks": {"EMAWeightAveraging": {}}}},
    "ModelPruning": {
        "options": {"callbacks": {"ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.3}}}
    },
    "SpikeDetection": {"options": {"callbacks": {"SpikeDetection": {"rtol": 1e9}}}},
    "time decides when it validates": {"options": {"val_check_interval": "00:01:00:00"}},
}
"""What a survivor's refusal names, and what it is refused for."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "named",
    [
        named if named.startswith("Regression") else only_in_sweep(named, id=named)
        for named in REFUSED
    ],
)
def test_what_a_survivor_has_not_is_repeated(quiet: RunConfig, tmp_path: Path, named: str) -> None:
    result, _ = fit(quiet, tmp_path / "killed", "backward", 9, **REFUSED[named])
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert named in asked["reason"]


def test_a_worker_without_peers_continues_from_its_copy(quiet: RunConfig, tmp_path: Path) -> None:
    alone = {"workers": 1, "rank": 0}
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **alone)
    copying = {**alone, "checkpoint_config": CheckpointConfig(memory=1)}
    result, weights = fit(quiet, tmp_path / "killed", "backward", 8, **copying)
    assert result.restarts == 1
    [first, again] = journal(result.path, "Launched")
    assert (first["start"], again["start"] is None) == (None, False)
    assert equal(weights, expected)
    assert result.history == undisturbed.history
