"""Lightning's callbacks: what a fit that resumes ends with, after each step of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugin_torch.conftest import Run
from tests.sweeps import Selected, only_in_sweep

BATCHES = 4
"""Of an epoch."""

STEPS = range(3 * BATCHES - 1, 2, -1)
"""After which a fit of three epochs stops, the last ones first."""

CALLBACKS = (
    "BackboneFinetuning",  # Which is a BaseFinetuning; another one saves as gradients are added up.
    "GradientAccumulationScheduler",
    "OnExceptionCheckpoint",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "WeightAveraging",
)


def weights(run: Run, output: Path, callback: str, *, stop_after: int | None) -> dict[str, Any]:
    """At the end of three epochs, after a second attempt if the first one stops."""

    def train() -> None:
        import lightning
        from lightning.pytorch import callbacks
        from torch.utils.data import DataLoader, TensorDataset

        import polytrain
        from polytrain_torch.lightning import Trainer

        is_first = polytrain.get_checkpoint() is None
        made = {
            "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(
                unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01
            ),
            "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler(
                {0: 1, 1: 2}
            ),
            "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.3),
            "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint(output),
            "SpikeDetection": lambda: callbacks.SpikeDetection(rtol=1e9),
            "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(
                swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=3
            ),
            "WeightAveraging": callbacks.WeightAveraging,
        }

        def save_within(trainer: Any, _module: Any, _outputs: Any, _batch: Any, index: int) -> None:
            if index == 2:
                trainer.save_checkpoint(output / f"{trainer.current_epoch}.ckpt")

        class Regression(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.backbone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
                self.head = torch.nn.Linear(4, 1)
                self.batches = 0

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                if is_first and self.batches == stop_after:
                    raise InterruptedError
                self.batches += 1
                x, y = batch
                return (self.head(self.backbone(x))[:, 0] - y).square().mean()

            def configure_optimizers(self) -> Any:
                trained = [each for each in self.parameters() if each.requires_grad]
                return torch.optim.Adam(trained, lr=0.02)

        # More often, the exception would come where a checkpoint is, and a save within a step would
        # be none; and the first checkpoint is to come after weights are pruned.
        often = {"OnExceptionCheckpoint": 2, "BackboneFinetuning": 2, "ModelPruning": BATCHES + 1}
        saves_every = often.get(callback, 1)
        adds_up = callback == "BackboneFinetuning"
        more = [callbacks.LambdaCallback(on_train_batch_end=save_within)] if adds_up else []
        torch.manual_seed(1)
        x = torch.randn(8, 3)
        module = Regression()
        trainer = Trainer(
            max_epochs=3,
            accumulate_grad_batches=2 if adds_up else 1,
            default_root_dir=str(output),
            logger=False,
            enable_model_summary=False,
            callbacks=[
                made[callback](),
                *more,
                callbacks.ModelCheckpoint(every_n_train_steps=saves_every),
            ],
        )
        try:
            trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1)), batch_size=2, shuffle=True))
        except InterruptedError:
            return
        torch.save(module.state_dict(), output / "weights.pt")

    output.mkdir()
    first = run(train)
    if stop_after is not None:
        run(train, restore_from=first.checkpoint)
    found: dict[str, Any] = torch.load(output / "weights.pt", weights_only=True)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("callback", [CALLBACKS[0], *map(only_in_sweep, CALLBACKS[1:])])
def test_a_fit_that_resumes_ends_with_the_same_weights(
    run: Run, tmp_path: Path, selected: Selected, callback: str
) -> None:
    expected = weights(run, tmp_path / "undisturbed", callback, stop_after=None)
    steps = selected(STEPS, 3)
    found = [weights(run, tmp_path / str(at), callback, stop_after=at) for at in steps]
    differing = [
        at
        for at, ours in zip(steps, found, strict=True)
        if not all(torch.equal(ours[name], expected[name]) for name in expected)
    ]
    assert not differing


def test_pruning_is_warned_of(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A restart trains again what was pruned, as with Lightning alone; it loads the checkpoint."""
    weights(run, tmp_path / "pruned", "ModelPruning", stop_after=None)
    [warning] = [each.message for each in caplog.records if "ModelPruning" in each.message]
    assert "differ after a restart" in warning
