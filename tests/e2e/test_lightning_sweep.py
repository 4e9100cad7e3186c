"""Every flag of Lightning's `Trainer` that touches data or saving, on two workers.

Killed once in mid-epoch, the weights at the end are compared with those of an uninterrupted run, to
the last bit; and without a kill with those of plain Lightning in one process, which takes the rows
of both workers in a step. The table in `docs/lightning.md` has the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal
from tests.e2e.torch_tables import table
from tests.sweeps import only_in_sweep

from polytrain import Result, RunConfig

fit_with_library = partial(torch_runs.fit, libraries=("lightning", "polytrain_torch.lightning"))

FLAGS: dict[str, dict[str, Any]] = {
    # It saves after validations, also while gradients are added up.
    "accumulate_grad_batches": {
        "accumulate_grad_batches": 2,
        "val_check_interval": 5,
        "saves_every": None,
    },
    "barebones": {"barebones": True},
    "callbacks": {"early_stopping": True, "saves_every": 5},
    "callbacks(EarlyStopping; saved before a validation)": {
        "early_stopping": True,
        "saves_every": 6,
    },
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2},
    "default_root_dir": {},
    "deterministic": {"deterministic": True},
    "enable_checkpointing": {"enable_checkpointing": False},
    "fast_dev_run": {"fast_dev_run": 9},
    "gradient_clip_algorithm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "gradient_clip_val": {"gradient_clip_val": 0.1},
    "limit_train_batches": {"limit_train_batches": 4},
    "limit_val_batches": {"limit_val_batches": 1},
    "log_every_n_steps": {"log_every_n_steps": 1},
    "max_epochs": {"max_epochs": 4},
    "max_steps": {"max_steps": 11},
    "max_time": {"max_time": "00:01:00:00"},
    "min_epochs": {"min_epochs": 3, "early_stopping": True, "saves_every": 5},
    "min_steps": {"min_steps": 13, "early_stopping": True, "saves_every": 5},
    "num_sanity_val_steps": {"num_sanity_val_steps": 1},
    "overfit_batches": {"overfit_batches": 3},
    "plugins": {"saves_in_a_thread": True},
    "precision": {"precision": "bf16-mixed"},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "strategy": {"strategy": "ddp_find_unused_parameters_true"},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "val_check_interval": {"val_check_interval": 2},
    "callbacks(EMAWeightAveraging)": {"callback": ("EMAWeightAveraging", {"decay": 0.5})},
    "callbacks(GradientAccumulationScheduler)": {
        "callback": ("GradientAccumulationScheduler", {"scheduling": {0: 1, 1: 2}})
    },
    "callbacks(ModelPruning)": {
        "callback": ("ModelPruning", {"pruning_fn": "l1_unstructured", "amount": 0.3}),
        # It prunes at the end of an epoch, after step 6, and a restart from that step repeats it.
        "saves_every": 7,
    },
    "callbacks(SpikeDetection)": {"callback": ("SpikeDetection", {"rtol": 1e9})},
    "callbacks(StochasticWeightAveraging)": {
        "callback": (
            "StochasticWeightAveraging",
            {"swa_lrs": 0.05, "swa_epoch_start": 2, "annealing_epochs": 3},
        )
    },
    "callbacks(WeightAveraging)": {"callback": ("WeightAveraging", {})},
    "callbacks(Timer)": {"callback": ("Timer", {"duration": "00:01:00:00"})},
}

OTHERS = {
    *("accelerator", "devices", "num_nodes"),  # The run sets them.
    *("limit_test_batches", "limit_predict_batches", "inference_mode"),  # Not in `fit`
    *("logger", "enable_progress_bar", "enable_model_summary", "enable_autolog_hparams"),
    *("profiler", "detect_anomaly", "benchmark", "sync_batchnorm", "model_registry"),
}
"""Flags that touch neither data nor saving."""


def train(config: dict[str, Any]) -> None:
    import os
    import signal

    import lightning
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
            )
            self.batches = 0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            context = polytrain.get_context()
            self.batches += 1
            if self.batches == config["dies_at"] and context.get_attempt() == 0:
                if context.get_world_rank() == 0:
                    polytrain.get_checkpoint()  # It waits for the commit
                torch.distributed.barrier()
                if context.get_world_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch
            return (self.layers(x)[:, 0] - y).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    lightning.seed_everything(1, verbose=False)
    options = {"max_epochs": 3, **config["options"]}
    callbacks: list[Any] = []
    if callback := options.pop("callback", None):
        name, arguments = callback
        callbacks.append(getattr(lightning.pytorch.callbacks, name)(**arguments))
    saves_every = options.pop("saves_every", 2)
    if options.get("enable_checkpointing", not options.get("barebones")):
        callbacks.append(ModelCheckpoint(every_n_train_steps=saves_every))
    if options.pop("early_stopping", False):
        callbacks.append(EarlyStopping("error", patience=1, min_delta=10.0))
    if options.pop("saves_in_a_thread", False):
        options["plugins"] = [AsyncCheckpointIO()]
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = TensorDataset(x, x.sum(1))
    module = Regression()
    trainer = Trainer(
        default_root_dir=config["output"],
        callbacks=callbacks,
        logger=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(
        module, DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)
    )
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), Path(config["output"], "weights.pt"))


def trained(quiet: RunConfig, output: Path, flag: str, *, dies_at: int = -1) -> Result:
    output.mkdir()
    config = {"output": str(output), "options": FLAGS[flag], "dies_at": dies_at}
    return fit_with_library(quiet, train, config)


TABLE = table("lightning.md", "flag of Lightning's `Trainer`")

CALLBACKS = table("lightning.md", "callback of Lightning")

NOTHING_TO_KEEP = {
    "BasePredictionWriter": "writes predictions",
    "Callback": "the base of all",
    "Checkpoint": "the base of those that save",
    "DeviceStatsMonitor": "logs",
    "LambdaCallback": "calls the user's functions",
    "LearningRateMonitor": "logs",
    "ModelSummary": "prints",
    "ProgressBar": "prints",
    "RichModelSummary": "prints",
    "RichProgressBar": "prints",
    "TQDMProgressBar": "prints",
    "ThroughputMonitor": "logs",
}
"""Callbacks of which a restart needs nothing, and what they do."""

IN_OTHER_TESTS = {
    "BackboneFinetuning": "plugin_torch/test_lightning_callbacks.py",
    "BaseFinetuning": "plugin_torch/test_lightning_callbacks.py",
    "BatchSizeFinder": "e2e/test_lightning_finders.py",
    "LearningRateFinder": "e2e/test_lightning_finders.py",
    "OnExceptionCheckpoint": "plugin_torch/test_lightning_callbacks.py",
}
"""Callbacks that one worker tries, or that need a module of their own."""

IN_EACH_FLAG = {"EarlyStopping", "ModelCheckpoint"}

IN_TEST = ("callbacks(EMAWeightAveraging)",)
"""Flags that `make test` tries too."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "flag", [flag if flag in IN_TEST else only_in_sweep(flag, id=flag) for flag in FLAGS]
)
def test_flags_are_what_the_table_says(quiet: RunConfig, tmp_path: Path, flag: str) -> None:
    trained(quiet, tmp_path / "undisturbed", flag)
    killed = trained(
        quiet, tmp_path / "killed", flag, dies_at=5 if "fast_dev_run" in FLAGS[flag] else 8
    )
    assert killed.restarts == 1
    weights = [
        torch.load(tmp_path / name / "weights.pt", weights_only=True)
        for name in ("undisturbed", "killed")
    ]
    found = "exact" if equal(*weights) else "differs"
    name = flag.removeprefix("callbacks(").removesuffix(")")
    expected = CALLBACKS[name] if name in CALLBACKS else TABLE[flag]
    assert ("no checkpoint" if killed.checkpoint is None else found) == expected.partition(",")[0]


def in_order(options: Mapping[str, Any], trainer: Any, output: Path, workers: int) -> list[float]:
    """The weights after a fit of rows in their order, without anything random.

    Args:
        options: flags, as above.
        trainer: Lightning's class, or polytrain's.
        output: a directory.
        workers: their number. Without them, a batch has the rows of two.
    """
    import lightning
    import torch
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return (self.layers(x)[:, 0] - y).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    lightning.seed_everything(1, verbose=False)
    options = {"max_epochs": 3, **options}
    options.pop("saves_every", None)
    callbacks: list[Any] = (
        [EarlyStopping("error", patience=1)] if options.pop("early_stopping", False) else []
    )
    if callback := options.pop("callback", None):
        name, arguments = callback
        callbacks.append(getattr(lightning.pytorch.callbacks, name)(**arguments))
    if options.pop("saves_in_a_thread", False):
        options["plugins"] = [AsyncCheckpointIO()]
    if workers == 1 and "strategy" in options:
        del options["strategy"]
    is_split = workers > 1 and options.get("use_distributed_sampler", True)
    rows = 8 if workers == 1 and options.get("use_distributed_sampler", True) else 4
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1))
    module = Regression()
    trainer(
        accelerator="cpu",
        default_root_dir=output / ("split" if is_split else "whole"),
        callbacks=callbacks,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    ).fit(module, DataLoader(data, batch_size=rows), DataLoader(data, batch_size=2 * rows))
    torch.use_deterministic_algorithms(False)
    return [float(each) for weight in module.parameters() for each in weight.flatten()]


def trains_in_order(config: dict[str, Any]) -> None:
    import polytrain
    from polytrain_torch.lightning import Trainer

    polytrain.report(
        {
            flag: in_order(options, Trainer, Path(config["output"], str(number)), 2)
            for number, (flag, options) in enumerate(config["flags"].items())
        }
    )


# `test_row_weights` compares it with one process in `make test`.
@pytest.mark.sweep
@pytest.mark.only_in_sweep
@pytest.mark.parametrize("part", range(6))
def test_two_workers_end_where_plain_lightning_ends(
    quiet: RunConfig, tmp_path: Path, part: int
) -> None:
    """Each part has every sixth flag: all of them would take too long for a test."""
    names = [*FLAGS][part::6]
    config = {"output": str(tmp_path), "flags": {name: FLAGS[name] for name in names}}
    found = fit_with_library(quiet, trains_in_order, config).metrics
    for name in names:
        plain = in_order(FLAGS[name], lightning.Trainer, tmp_path / name, 1)
        # Half of the rows at a time, other digits are cut off.
        tolerance = 2e-2 if name == "precision" else 1e-5
        np.testing.assert_allclose(found[name], plain, atol=tolerance, err_msg=name)


def test_the_table_has_every_flag() -> None:
    flags = inspect.signature(lightning.Trainer.__init__).parameters.keys() - {"self"}
    assert TABLE.keys() | {f"callbacks({name})" for name in CALLBACKS} >= FLAGS.keys()
    assert TABLE.keys() <= FLAGS.keys()
    assert flags - OTHERS == {name.partition("(")[0] for name in TABLE}


def test_the_table_has_every_callback() -> None:
    """A callback that Lightning adds needs a row, and a test or a reason why it needs none."""
    shipped = set(lightning.pytorch.callbacks.__all__)
    tried = {name for name in shipped if f"callbacks({name})" in FLAGS}
    assert CALLBACKS.keys() == shipped
    assert shipped == tried | NOTHING_TO_KEEP.keys() | IN_OTHER_TESTS.keys() | IN_EACH_FLAG
    without = {name for name, found in CALLBACKS.items() if found == "nothing to keep"}
    assert without == NOTHING_TO_KEEP.keys()
    tests = Path(__file__).parents[1]
    for name, file in IN_OTHER_TESTS.items():
        assert name in (tests / file).read_text()
