"""What each `ModelCheckpoint` of several knows in a `fit` that resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.plugin_torch.conftest import Run
from tests.sweeps import only_in_sweep

LOSS: dict[str, Any] = {"monitor": "loss", "save_top_k": -1}
ERROR: dict[str, Any] = {"monitor": "error", "save_top_k": -1}
OFTEN: dict[str, Any] = {"every_n_train_steps": 2}


def saved(run: Run, output: Path, *, stops_at: tuple[str, int] | None, **config: Any) -> Any:
    """What each knows at the end of two epochs, after a second attempt if the first one stops."""

    def train() -> None:
        import lightning
        import torch
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader, TensorDataset

        import polytrain
        from polytrain_torch.lightning import Trainer

        is_first = polytrain.get_checkpoint() is None

        def at(place: str) -> None:
            batch = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            if is_first and (place, batch) == stops_at and not trainer.sanity_checking:
                raise InterruptedError

        class Regression(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(3, 1)

            def loss(self, batch: Any) -> torch.Tensor:
                x, y = batch
                return (self.layer(x)[:, 0] - y).square().mean()

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                at("training")
                loss = self.loss(batch)
                self.log("loss", loss)
                return loss

            def validation_step(self, batch: Any, index: int) -> None:
                at("validation")
                self.log("error", self.loss(batch))

            def on_train_end(self) -> None:
                at("end")

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.02)

        torch.manual_seed(1)
        x = torch.randn(12, 3)
        rows = TensorDataset(x, x.sum(1))
        callbacks = [
            ModelCheckpoint(filename=f"{number}-{{step}}", **options)
            for number, options in enumerate(config["saves"])
        ]
        trainer = Trainer(
            max_epochs=2,
            default_root_dir=str(output),
            logger=False,
            enable_model_summary=False,
            val_check_interval=config.get("validates_every", 1.0),
            callbacks=callbacks,
        )
        try:
            # The last one is `ckpt_path`.
            trainer.fit(Regression(), DataLoader(rows, batch_size=2), DataLoader(rows), None, None)
        except InterruptedError:
            return
        found = [
            {
                "best": Path(each.best_model_path).name,
                "last": Path(each.last_model_path).name,
                "scores": {Path(path).name: x.item() for path, x in each.best_k_models.items()},
            }
            for each in callbacks
        ]
        (output / "saved.json").write_text(json.dumps(found))

    output.mkdir()
    first = run(train)
    if stops_at is not None:
        run(train, restore_from=first.checkpoint)
    return json.loads((output / "saved.json").read_text())


CASES: dict[str, tuple[tuple[str, int], dict[str, Any]]] = {
    "after a batch": (
        ("training", 5),
        {"saves": [{"every_n_train_steps": 2}, {"every_n_train_steps": 4, **LOSS}]},
    ),
    "after a batch, before a validation": (
        ("validation", 4),
        {
            "saves": [{"every_n_train_steps": 4}, {"every_n_train_steps": 2, **LOSS}],
            "validates_every": 4,
        },
    ),
    "after a batch, and after its validation": (
        ("validation", 4),
        {
            "saves": [{"every_n_train_steps": 2}, {"every_n_train_steps": 3, **ERROR}],
            "validates_every": 4,
        },
    ),
    "after a validation": (("training", 5), {"saves": [{}, ERROR], "validates_every": 2}),
    "after an epoch": (("training", 7), {"saves": [{}, LOSS, {"save_last": True, **ERROR}]}),
    "after the last epoch": (("end", 12), {"saves": [{}, ERROR]}),
    "after the first last": (("training", 3), {"saves": [{"save_last": True, **OFTEN}]}),
    "after the first link": (("training", 3), {"saves": [{"save_last": "link", **OFTEN}]}),
    "with links": (
        ("training", 5),
        {
            "saves": [
                {"every_n_train_steps": 2},
                {"every_n_train_steps": 2, "save_last": "link", **LOSS},
            ]
        },
    ),
}
"""Where a first attempt stops, and which are due together before that."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    # A link has more to lose than a file of its own.
    [only_in_sweep(each) if each == "after the first last" else each for each in CASES],
)
def test_each_knows_all_that_it_has_saved(run: Run, tmp_path: Path, case: str) -> None:
    stops_at, config = CASES[case]
    expected = saved(run, tmp_path / "undisturbed", stops_at=None, **config)
    assert saved(run, tmp_path / "stopped", stops_at=stops_at, **config) == expected


@pytest.mark.parametrize("is_lost", [False, True])
def test_only_a_last_file_that_exists_is_named(tmp_path: Path, is_lost: bool) -> None:
    """A link is in no checkpoint's state if it was made after that."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from polytrain_torch.lightning.savers import all_saved_last, set_all_saved_last

    first, second = (ModelCheckpoint(tmp_path, save_last="link") for _ in range(2))
    first.last_model_path = str(tmp_path / "last.ckpt")
    if not is_lost:
        Path(first.last_model_path).touch()
    whole = SimpleNamespace(reduce_boolean_decision=lambda decision, **_: decision)
    trainer: Any = SimpleNamespace(
        checkpoint_callbacks=[first], is_global_zero=True, strategy=whole
    )
    saved = all_saved_last(trainer)
    trainer.checkpoint_callbacks = [second]
    set_all_saved_last(trainer, saved)
    assert second.last_model_path == ("" if is_lost else first.last_model_path)
    # As in the checkpoints of an earlier version.
    del saved[first.state_key]["last"]
    set_all_saved_last(trainer, saved)


def test_the_file_of_the_resumed_checkpoint_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from polytrain_torch.lightning import best_model

    alone = SimpleNamespace(get_rank=lambda: 0, broadcast_object_list=lambda _: None)
    monkeypatch.setattr(best_model, "dist", alone)
    # It has no checkpoint that could be fetched.
    reported = SimpleNamespace(metrics={"step": 4})
    monkeypatch.setattr(best_model, "get_all_reported_checkpoints", lambda _: [reported])
    files = best_model.SavedFiles(file="lightning.ckpt", fit_file="fit")
    (tmp_path / "lightning.ckpt").write_text("weights")
    (tmp_path / "fit").write_text("1")
    files.write(tmp_path, {"/gone/last.ckpt": 4})
    callback = ModelCheckpoint(tmp_path / "here", save_last=True)
    state = {**callback.state_dict(), "dirpath": "/gone", "last_model_path": "/gone/last.ckpt"}
    checkpoint = {"global_step": 4, "callbacks": {callback.state_key: state}}
    files.restore(SimpleNamespace(checkpoint_callbacks=[callback]), checkpoint, tmp_path)
    assert state["last_model_path"] == str(tmp_path / "here" / "last.ckpt")
    assert Path(state["last_model_path"]).read_text() == "weights"
