"""What users of torch and TensorFlow do in training functions, and what they get for it."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e import torch_runs

from polytrain import Result, RunConfig, ScalingConfig, TrainingFailedError, make_trainer

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")


def starts_processes(config: dict[str, Any]) -> None:
    """In every way that there is, with torch and its threads up in a forked trainer."""
    import multiprocessing
    import subprocess
    import sys

    import torch
    from torch.utils.data import DataLoader

    import polytrain
    from polytrain_torch import prepare_data_loader

    torch.ones(200, 200) @ torch.ones(200, 200)
    results = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            results[method] = sum(pool.map(abs, [-1, -2, -3]))
    for method in ("fork", "spawn"):
        loader = DataLoader(
            torch.arange(16.0), batch_size=4, num_workers=1, multiprocessing_context=method
        )
        batches = [batch.sum() for batch in prepare_data_loader(loader)]
        total = torch.stack(batches).sum()
        torch.distributed.all_reduce(total)
        results[f"loader by {method}"] = int(total)
    command = [sys.executable, "-c", "print(6)"]
    results["command"] = int(subprocess.run(command, capture_output=True, text=True).stdout)
    polytrain.report(results)


def tokenizes_in_processes(config: dict[str, Any]) -> None:
    """By a tokenizer that has threads of its own, before and after it is forked."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.utils.data import DataLoader

    import polytrain
    from polytrain_torch import prepare_data_loader

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.encode_batch(["a b"] * 1000)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return {"ids": tokenizer.encode(row["text"]).ids}

    texts = datasets.Dataset.from_dict({"text": ["a b b"] * 8})
    # Its own directory: ranks would write into one file.
    cache = f"{config['cache']}/{polytrain.get_context().get_world_rank()}"
    mapped = texts.map(encode, num_proc=2, cache_file_name=f"{cache}.arrow")
    loader = DataLoader(
        [{"text": "a b b"}] * 8,
        batch_size=2,
        num_workers=2,
        collate_fn=lambda rows: [*map(encode, rows)],
    )
    loaded = [row["ids"] for batch in prepare_data_loader(loader) for row in batch]
    polytrain.report({"mapped": mapped["ids"][:], "loaded": loaded})


def test_tokenizers_may_be_used_in_processes(quiet: RunConfig, tmp_path: Path) -> None:
    result = torch_runs.fit(quiet, tokenizes_in_processes, {"cache": str(tmp_path)})
    assert result.metrics == {"mapped": [[0, 1, 1]] * 8, "loaded": [[0, 1, 1]] * 4}


def test_a_training_function_may_start_processes(quiet: RunConfig) -> None:
    assert torch_runs.fit(quiet, starts_processes, {}).metrics == {
        **dict.fromkeys(("fork", "spawn", "forkserver", "command"), 6),
        "loader by fork": 120,
        "loader by spawn": 120,
    }


def loses_a_loader_worker(config: dict[str, Any]) -> None:
    import os
    import signal

    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    import polytrain
    from polytrain_torch import prepare_data_loader

    context = polytrain.get_context()
    dies = context.get_world_rank() == 1 and context.get_attempt() == 0

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            if dies and index > 7:
                assert get_worker_info() is not None
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.tensor(float(index))

    seen = torch.zeros(())
    for batch in prepare_data_loader(DataLoader(Rows(), batch_size=2, num_workers=1)):
        seen += batch.sum()
    torch.distributed.all_reduce(seen)
    polytrain.report({"seen": seen})


def test_a_loaders_worker_that_dies_costs_an_attempt(quiet: RunConfig) -> None:
    result = torch_runs.fit(quiet, loses_a_loader_worker, {})
    assert (result.restarts, result.metrics) == (1, {"seen": 120.0})


def test_two_trainers_at_once_in_one_driver(quiet: RunConfig, tmp_path: Path) -> None:
    """On threads, of the same backend and of different ones."""

    def train(config: dict[str, Any]) -> None:
        import torch

        import polytrain

        total = torch.tensor(config["value"])
        torch.distributed.all_reduce(total)
        polytrain.report({"total": total})

    def by_torch(value: float) -> Result:
        run = dataclasses.replace(quiet, storage_path=tmp_path / str(value))
        return torch_runs.fit(run, train, {"value": value}, workers=1)

    def by_xgboost() -> Result:
        return make_trainer(
            "xgboost",
            label="y",
            datasets={"train": {**dict(zip("abc", X.T, strict=True)), "y": X.sum(1)}},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=dataclasses.replace(quiet, storage_path=tmp_path / "xgboost"),
        ).fit()

    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(by_torch, 1.0), threads.submit(by_torch, 2.0)]
        boosted = threads.submit(by_xgboost)
        assert [run.result().metrics["total"] for run in runs] == [1.0, 2.0]
        assert boosted.result().load_model().num_boosted_rounds() == 10


def builds_outside(config: dict[str, Any]) -> None:
    import keras

    import polytrain

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    shard = polytrain.get_dataset_shard("train")
    data = shard.to_tf(feature_columns="x", label_columns="y", batch_size=8)
    model.fit(data, shuffle=False, verbose=0)


def fits_arrays_outside(config: dict[str, Any]) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.ones((8, 3)), np.ones(8), verbose=0)


def fits_a_shard_as_arrays(config: dict[str, Any]) -> None:
    import keras

    import polytrain
    import polytrain_tf

    with polytrain_tf.strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    frame = polytrain.get_dataset_shard("train").to_pandas()
    model.fit(np.stack(frame["x"]), frame["y"].to_numpy(), verbose=0)


def fit_keras(quiet: RunConfig, function: Any) -> Result:
    return make_trainer(
        "tensorflow",
        function,
        train_loop_config={},
        datasets={"train": {"x": X, "y": X.sum(axis=1)}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=quiet,
    ).fit()


def test_a_model_outside_the_strategys_scope_is_refused(quiet: RunConfig) -> None:
    """Its workers would train beside each other."""
    with pytest.raises(TrainingFailedError, match=r"polytrain_tf\.strategy\(\)\.scope\(\)"):
        fit_keras(quiet, builds_outside)


def test_arrays_for_a_model_outside_are_refused_too(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match=r"polytrain_tf\.strategy\(\)\.scope\(\)"):
        fit_keras(quiet, fits_arrays_outside)


def test_a_shard_that_would_be_split_again_is_reported_of(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    fit_keras(quiet, fits_a_shard_as_arrays)
    assert "a worker's shard is split already" in capfd.readouterr().err


def asks_for_too_many_steps(config: dict[str, Any]) -> None:
    import keras

    import polytrain
    import polytrain_tf
    from polytrain_tf.reporting import ReportCallback

    with polytrain_tf.strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    shard = polytrain.get_dataset_shard("train")
    data = shard.to_tf(feature_columns="x", label_columns="y", batch_size=8)
    model.fit(
        data,
        steps_per_epoch=100,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[ReportCallback()],
    )
    polytrain.report({"steps": int(model.optimizer.iterations.numpy())})


def test_an_epoch_is_over_when_its_rows_are(quiet: RunConfig) -> None:
    """However many steps were asked for: Keras warns, and the next epoch begins."""
    assert fit_keras(quiet, asks_for_too_many_steps).metrics["steps"] == 8


def gives_what_no_worker_can_use(config: dict[str, Any]) -> None:
    """Objects as `import pytorch_lightning as pl` has them, and strategies of notebooks."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    import polytrain
    from polytrain_torch.lightning import Trainer

    def of_other_package(name: str, *bases: type) -> Any:
        base = type(name, bases, {"__module__": "pytorch_lightning.core"})
        return type("Mine", (base,), {})()

    def usual() -> Any:
        return Trainer(max_epochs=1, logger=False)

    module = of_other_package("LightningModule", torch.nn.Module)
    data = of_other_package("LightningDataModule")
    callback = of_other_package("Callback")
    calls = {
        "fit": lambda: usual().fit(module),
        "fit, compiled": lambda: usual().fit(torch.compile(module)),
        "fit, data": lambda: usual().fit(torch.nn.Linear(1, 1), datamodule=data),
        "validate": lambda: usual().validate(module),
        "test": lambda: usual().test(model=module),
        "predict": lambda: usual().predict(module),
        "callback": lambda: Trainer(callbacks=callback),
        "callbacks": lambda: Trainer(callbacks=[callback]),
        "logger": lambda: Trainer(logger=of_other_package("Logger")),
        "strategy": lambda: Trainer(strategy=of_other_package("Strategy")),
        "starts, by name": lambda: Trainer(strategy="ddp_notebook"),
        "starts": lambda: Trainer(strategy=DDPStrategy(start_method="spawn")),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            errors[name] = str(error)
    polytrain.report({"errors": errors, "calls": len(calls)})


def test_what_no_worker_can_use_is_refused_with_what_works(quiet: RunConfig) -> None:
    result = torch_runs.fit(
        quiet,
        gives_what_no_worker_can_use,
        {},
        workers=1,
        libraries=("lightning", "polytrain_torch.lightning"),
    )
    errors = result.metrics["errors"]
    assert len(errors) == result.metrics["calls"]
    for name, error in errors.items():
        remedy = "use 'ddp'" if name.startswith("starts") else "by `import lightning.pytorch as pl`"
        assert remedy in error, name
