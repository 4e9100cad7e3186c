"""Training functions as they are written for Ray Train, with nothing changed but the imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.sweeps import only_in_sweep

import polytrain as train

TABLE = pd.DataFrame({"x": np.arange(64.0), "z": np.arange(64.0) % 5, "y": np.arange(64.0) % 2})
TWO = train.ScalingConfig(num_workers=2)


def stored(tmp_path: Path) -> train.RunConfig:
    return train.RunConfig(name="run", storage_path=tmp_path, progress=False)


def torch_loop(config: dict[str, Any]) -> None:
    import os
    import tempfile

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    train.torch.enable_reproducibility(3)
    model = train.torch.prepare_model(torch.nn.Linear(1, 1))
    rows = TensorDataset(torch.arange(8.0)[:, None], torch.arange(8.0)[:, None])
    loader = train.torch.prepare_data_loader(DataLoader(rows, batch_size=2), True, True)
    shard = train.get_dataset_shard("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(2):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rows_seen = sum(len(batch["x"]) for batch in shard.iter_torch_batches(batch_size=8))
        metrics = {"epoch": epoch, "rows": rows_seen, "batches": len(loader)}
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = train.Checkpoint.from_directory(directory)
            train.report(metrics, checkpoint=checkpoint)
    assert [str(each) for each in train.torch.get_devices()] == ["cpu"]


def test_torch(tmp_path: Path) -> None:
    trainer = train.torch.TorchTrainer(
        torch_loop,
        train_loop_config={"lr": 1e-3},
        torch_config=train.torch.TorchConfig("gloo", timeout_s=600),
        scaling_config=TWO,
        run_config=stored(tmp_path),
        datasets={"train": lambda: TABLE},
        dataset_config=train.DataConfig(columns=["x"]),
    )
    result = trainer.fit()
    assert result.metrics == {"epoch": 1, "rows": 32, "batches": 2}
    assert set(result.load_model()) == {"weight", "bias"}


def xgboost_loop() -> None:
    import xgboost

    from polytrain.xgboost import RayTrainReportCallback

    rows = train.get_dataset_shard("train").to_pandas()
    matrix = xgboost.DMatrix(rows[["x", "z"]], label=rows["y"])
    xgboost.train(
        {"objective": "binary:logistic"},
        matrix,
        num_boost_round=3,
        evals=[(matrix, "train")],
        callbacks=[RayTrainReportCallback({"loss": "train-logloss"}, "trees.ubj", frequency=2)],
    )


def test_xgboost(tmp_path: Path) -> None:
    from polytrain.xgboost import RayTrainReportCallback, XGBoostTrainer

    result = XGBoostTrainer(
        xgboost_loop, scaling_config=TWO, run_config=stored(tmp_path), datasets={"train": TABLE}
    ).fit()
    assert [set(metrics) for metrics in result.history] == [{"loss"}] * 3
    assert [len(checkpoint.path) > 0 for checkpoint, _ in result.best_checkpoints] == [True] * 2
    assert result.checkpoint is not None
    model = RayTrainReportCallback.get_model(result.checkpoint, "trees.ubj")
    assert model.num_boosted_rounds() == 3


def lightgbm_loop() -> None:
    import lightgbm

    from polytrain.lightgbm import RayTrainReportCallback, get_network_params

    rows = train.lightgbm.normalize_pandas_for_lightgbm(train.get_dataset_shard().to_pandas())
    data = lightgbm.Dataset(rows[["x", "z"]], label=rows["y"])
    lightgbm.train(
        {"objective": "binary", "verbosity": -1, "min_data_in_leaf": 1, **get_network_params()},
        data,
        num_boost_round=3,
        valid_sets=[data],
        valid_names=["train"],
        callbacks=[RayTrainReportCallback("train-binary_logloss", checkpoint_at_end=False)],
    )


def test_lightgbm(tmp_path: Path) -> None:
    result = train.lightgbm.LightGBMTrainer(
        lightgbm_loop, scaling_config=TWO, run_config=stored(tmp_path), datasets={"train": TABLE}
    ).fit()
    assert [set(metrics) for metrics in result.history] == [{"train-binary_logloss"}] * 3
    assert result.checkpoint is None


def test_boosters_train_from_parameters_as_they_once_did(tmp_path: Path) -> None:
    result = train.xgboost.XGBoostTrainer(
        label_column="y",
        params={"objective": "binary:logistic"},
        num_boost_round=2,
        run_config=stored(tmp_path),
        datasets={"train": TABLE},
    ).fit()
    assert result.load_model().num_boosted_rounds() == 2


def keras_loop(config: dict[str, Any]) -> None:
    import json
    import os

    import keras
    import tensorflow as tf

    from polytrain.tensorflow.keras import ReportCheckpointCallback

    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    assert len(cluster["worker"]) == train.get_context().get_world_size()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert isinstance(strategy, tf.distribute.experimental.MultiWorkerMirroredStrategy)
    # Several workers have one server each, and so one strategy.
    is_the_runs = strategy is train.tensorflow.strategy()
    assert is_the_runs == (train.get_context().get_world_size() > 1)
    with strategy.scope():
        inputs = {name: keras.Input((1,), name=name) for name in ("x", "z")}
        both = keras.layers.Concatenate()([*inputs.values()])
        outputs = {name: keras.layers.Dense(1, name=name)(both) for name in ("y", "w")}
        model = keras.Model(inputs, outputs)
        model.compile(loss={"y": "mse", "w": "mse"}, optimizer="sgd")
    data = train.get_dataset_shard("train").to_tf(
        feature_columns=["x", "z"], label_columns=["y", "w"], batch_size=16
    )
    callback = ReportCheckpointCallback(checkpoint_on="train_end", metrics={"mse": "loss"})
    model.fit(data, epochs=2, verbose=0, callbacks=[callback])


@pytest.mark.sweep
@pytest.mark.parametrize("num_workers", [only_in_sweep(0), 2])
def test_keras(tmp_path: Path, num_workers: int) -> None:
    result = train.tensorflow.TensorflowTrainer(
        keras_loop,
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=stored(tmp_path),
        datasets={"train": TABLE.assign(w=1 - TABLE["y"])},
    ).fit()
    assert [set(metrics) for metrics in result.history] == [{"mse"}] * 3
    assert len(result.best_checkpoints) == 1
    row = {"x": np.zeros((1, 1)), "z": np.zeros((1, 1))}
    predicted = result.load_model().predict(row, verbose=0)
    assert {name: array.shape for name, array in predicted.items()} == {"y": (1, 1), "w": (1, 1)}


def lightning_loop() -> None:
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            [x] = batch
            loss = self.layer(x).square().mean()
            self.log("loss", loss)
            self.log("rows", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_epochs=2,
        devices="auto",
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Regression(), DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2))


def test_lightning(tmp_path: Path) -> None:
    result = train.torch.TorchTrainer(
        lightning_loop, scaling_config=TWO, run_config=stored(tmp_path)
    ).fit()
    # Two workers: each has half of the rows.
    assert [(m["epoch"], m["step"], m["rows"]) for m in result.history] == [(0, 2, 4), (1, 4, 4)]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "checkpoint.ckpt").is_file()


def transformers_loop(config: dict[str, Any]) -> None:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from polytrain.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(1, 1)
            self.post_init()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = (self.layer(x)[:, 0] - labels).square().mean()
            return {"loss": loss, "logits": labels}

    trainer = Trainer(
        model=Regression(PretrainedConfig()),
        args=TrainingArguments(
            output_dir=config["output"],
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"x": torch.ones(1), "labels": torch.tensor(1.0)}] * 16,
    )
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    trainer.train()


def test_transformers(tmp_path: Path) -> None:
    result = train.torch.TorchTrainer(
        transformers_loop,
        train_loop_config={"output": str(tmp_path / "output")},
        scaling_config=TWO,
        run_config=stored(tmp_path),
    ).fit()
    assert [metrics["step"] for metrics in result.history] == [2, 4]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "checkpoint", "model.safetensors").is_file()


def test_a_strategy_that_knows_no_workers_is_refused(tmp_path: Path) -> None:
    def loop() -> None:
        import lightning

        with pytest.raises(ValueError, match="RayDDPStrategy"):
            train.lightning.prepare_trainer(lightning.Trainer(accelerator="cpu", logger=False))

    train.torch.TorchTrainer(loop, run_config=stored(tmp_path)).fit()


def plain_loop() -> None:
    train.report({"rank": train.get_context().get_world_rank()})


def test_a_trainer_without_a_framework(tmp_path: Path) -> None:
    result = train.DataParallelTrainer(
        plain_loop, scaling_config=TWO, run_config=stored(tmp_path)
    ).fit()
    assert result.metrics == {"rank": 0}


def test_what_fit_refuses_is_named_as_in_ray_train(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    directory.joinpath("model").touch()
    trainer = train.DataParallelTrainer(
        plain_loop, run_config=stored(tmp_path), resume_from_checkpoint=directory
    )
    shutil.rmtree(directory)
    with pytest.raises(train.InvalidJobError, match="- resume_from_checkpoint: it can't"):
        trainer.fit()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"metadata": {"a": 1}}, "metadata: a run stores none"),
        ({"validation_config": print}, "validation_config: it is a builtin_function_or_method"),
        ({"torch_config": {"backend": "gloo"}}, "torch_config: it is a dict. Pass a TorchConfig"),
        ({"torch_config": train.xgboost.XGBoostConfig()}, "torch_config: it is an XGBoostConfig"),
        ({"torch_config": train.torch.TorchConfig}, r"the class TorchConfig. Pass TorchConfig\(…"),
        ({"torch_config": train.torch.TorchConfig("glo")}, "TorchConfig.backend: torch has no"),
        ({"resume_from_checkpoint": 3}, "resume_from_checkpoint: it is an int"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(train.InvalidJobError, match=what):
        train.torch.TorchTrainer(plain_loop, **arguments)


def test_a_label_is_asked_for_by_its_name_in_ray_train() -> None:
    with pytest.raises(train.InvalidJobError, match="label_column: it is required"):
        train.xgboost.XGBoostTrainer(datasets={"train": {"x": [1.0]}}, params={})
    with pytest.raises(TypeError, match=r"unexpected keyword .*Did you mean 'label_column'"):
        train.xgboost.XGBoostTrainer(label_colum="x")  # type: ignore[call-arg]  # the point


def test_a_rendezvous_that_torch_does_not_know_is_named() -> None:
    with pytest.raises(train.InvalidJobError, match=r"TorchConfig.init_method: 'file'"):
        train.torch.TorchConfig(init_method="file")  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(
    ("door", "plugin", "extra"),
    [
        ("torch.prepare_model", "polytrain_torch", "torch"),
        ("xgboost.bin_reference", "polytrain_xgboost", "xgboost"),
        ("lightgbm.network_params", "polytrain_lightgbm", "lightgbm"),
        ("tensorflow.strategy", "polytrain_tf", "tf"),
        ("lightning.Trainer", "polytrain_torch", "torch"),
        ("huggingface.transformers.prepare_trainer", "polytrain_torch", "torch"),
    ],
)
def test_a_plugin_that_is_not_installed_comes_with_its_command(
    door: str, plugin: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    name = door.rpartition(".")
    module = import_module(f"polytrain.{name[0]}")
    monkeypatch.delitem(vars(module), name[2], raising=False)
    for loaded in [each for each in sys.modules if each.partition(".")[0] == plugin]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, plugin, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install '.*\[{extra}\]'"):
        getattr(module, name[2])


def test_doors_import_nothing_until_they_are_used() -> None:
    script = (
        "import sys, polytrain as train\n"
        "train.torch, train.lightning, train.huggingface.transformers, train.tensorflow.keras\n"
        "loaded = {each.partition('.')[0] for each in sys.modules}\n"
        "print(sorted(loaded & {'ray', 'numpy', 'torch', 'polytrain_torch', 'polytrain_tf'}))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
