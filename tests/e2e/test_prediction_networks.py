"""Predictions of networks: torch, whose code the user brings, and Keras, whose model is whole."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import polytrain
from polytrain import Checkpoint, InvalidJobError, Result, RunConfig, ScalingConfig, make_trainer
from polytrain.policy.scaling import ClusterChoice
from polytrain.prediction import predict

ROWS = 600
WEIGHTS = [1.0, -2.0, 0.5]


def table() -> pa.Table:
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    names = [f"x{i}" for i in range(3)]
    columns = dict(zip(names, x.T, strict=True))
    return pa.table({"id": [f"row {i}" for i in range(ROWS)], **columns, "y": x @ WEIGHTS})


def build() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def train(config: dict[str, Any]) -> None:
    from polytrain_torch import TrainingState

    TrainingState(model=build()).report({"loss": 0.0})


def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("runs")
    return {
        "scaling_config": ScalingConfig(num_workers=0),
        "run_config": RunConfig(name="run", storage_path=path, progress=False),
    }


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return make_trainer("torch", train, **config(tmp_path_factory)).fit()


def by_torch() -> np.ndarray[Any, Any]:
    """What the framework itself predicts, for all rows at once."""
    import torch

    x = table().select(["x0", "x1", "x2"]).to_pandas().to_numpy(dtype=np.float32)
    with torch.inference_mode():
        found: np.ndarray[Any, Any] = build()(torch.from_numpy(x)).numpy()
    return found


FEATURES = ["x0", "x1", "x2"]


def collate(batch: dict[str, Any]) -> Any:
    import torch

    return torch.from_numpy(np.stack([batch[name] for name in FEATURES], 1).astype(np.float32))


def of_directory(directory: str) -> Any:
    import torch

    model = torch.nn.Linear(3, 1)
    model.load_state_dict(torch.load(Path(directory) / "model.pt", weights_only=True))
    return model


def both(model: Any, batch: Any) -> dict[str, Any]:
    found = model(batch)
    gpu = np.full(len(found), os.environ["CUDA_VISIBLE_DEVICES"])
    return {"score": found[:, 0], "pair": found.repeat(1, 2), "gpu": gpu}


@pytest.mark.parametrize(
    "options",
    [
        {"model_fn": build, "features": FEATURES},
        {"model_fn": build, "collate_fn": collate},
        {"model_fn": of_directory, "features": FEATURES, "device": "cpu"},
        {"model_fn": build, "features": FEATURES, "batch_size": 7},
    ],
    ids=["features", "collate_fn", "a directory", "batch_size"],
)
def test_torch_predicts_as_the_module_does(of_torch: Result, options: dict[str, Any]) -> None:
    found = np.asarray(of_torch.predict(table(), **options))
    assert found.shape == (ROWS, 1)
    assert found == pytest.approx(by_torch(), rel=1e-5, abs=1e-6)


def test_workers_get_the_users_functions_and_a_gpu_each(
    of_torch: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = ClusterChoice(is_local=True, reason="this machine has two GPUs")
    monkeypatch.setattr(predict, "new_ray_problems", lambda *_: ())
    monkeypatch.setattr(predict, "choose_cluster", lambda *_: choice)
    monkeypatch.setattr(predict, "visible_gpus", lambda _: ("3", "5"))
    of_torch.predict(
        table(), output=tmp_path / "out", keep=["id"], num_workers=4, rows_per_file=100,
        model_fn=build, collate_fn=collate, forward=both, device="cpu", use_gpu=True,
    )  # fmt: skip
    stored = pq.read_table(tmp_path / "out")
    assert stored.column_names == ["id", "score", "pair", "gpu"]
    assert {*stored["gpu"].to_pylist()} <= {"3", "5"}
    assert stored["id"].to_pylist() == table()["id"].to_pylist()
    expected = by_torch()[:, 0]
    assert stored["score"].to_numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert np.stack(stored["pair"].to_pylist())[:, 1] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def numbers(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in FEATURES}


def test_a_column_that_is_kept_reaches_the_model_if_the_transform_returns_it(
    of_torch: Result, tmp_path: Path
) -> None:
    assert of_torch.checkpoint is not None
    (tmp_path / "alone").mkdir()
    shutil.copy(Path(of_torch.checkpoint.path, "model.pt"), tmp_path / "alone")
    of_torch.predict(
        table(), output=tmp_path / "out", keep=["id", "x0"], num_workers=0, model_fn=build,
        collate_fn=collate, transform=numbers, checkpoint=Checkpoint(str(tmp_path / "alone")),
    )  # fmt: skip
    stored = pq.read_table(tmp_path / "out")
    assert stored["id"].to_pylist() == table()["id"].to_pylist()
    found = np.stack(stored["prediction"].to_pylist())
    assert found == pytest.approx(by_torch(), rel=1e-5, abs=1e-6)


def test_a_smaller_batch_or_another_device_resumes(of_torch: Result, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_fn": build, "features": FEATURES, "output": tmp_path / "out"}
    first = of_torch.predict(table(), batch_size=100, **options)
    assert of_torch.predict(table(), batch_size=10, device="cpu", **options) == first
    with pytest.raises(InvalidJobError, match=r"model_fn: .* begun with different code"):
        of_torch.predict(table(), **{**options, "model_fn": lambda: build()})


def wrong_size() -> Any:
    import torch

    return torch.nn.Linear(2, 1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no model_fn": ({}, "model_fn: it is required: a checkpoint of torch has the weights"),
    "a module": ({"model_fn": build()}, "model_fn: a Linear is a module, not a function"),
    "no function": ({"model_fn": "build"}, "model_fn: 'build' isn't a function"),
    "misspelt": ({"model_fn": build, "feature": ["x0"]}, "feature: .*Did you mean 'features'"),
    "a column that is missing": (
        {"model_fn": build, "features": ["x9"]},
        "features: the data has no column 'x9'",
    ),
    "texts": ({"model_fn": build}, "features: the column 'id' is string, which can't become"),
    "two inputs": (
        {"model_fn": build, "features": FEATURES, "collate_fn": collate},
        "features: it can't be used with collate_fn",
    ),
    "no collate function": (
        {"model_fn": build, "collate_fn": 1},
        "collate_fn: 1 isn't a function",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_torch_are_named(of_torch: Result, tmp_path: Path, case: str) -> None:
    options, expected = WRONG[case]
    with pytest.raises(InvalidJobError, match=expected):
        of_torch.predict(table(), output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_explained(of_torch: Result) -> None:
    with pytest.raises(ValueError, match=r"model_fn builds doesn't fit the checkpoint's weights"):
        of_torch.predict(table(), model_fn=wrong_size, features=FEATURES)
    with pytest.raises(TypeError, match=r"returned a tuple\. Pass forward="):
        of_torch.predict(
            table(), model_fn=build, features=FEATURES, forward=lambda model, batch: (batch,)
        )


def keras_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return make_trainer(
        "tensorflow",
        model=keras_model,
        compile={"optimizer": "sgd", "loss": "mse"},
        label="y",
        datasets={"train": table().drop_columns(["id"])},
        **config(tmp_path_factory),
    ).fit()


def test_keras_predicts_from_the_path_alone(of_keras: Result, tmp_path: Path) -> None:
    # Neither the backend's `features` nor the model's code: the checkpoint has both.
    pq.write_table(table().select(["x2", "id", "x0", "x1"]), tmp_path / "rows.parquet")
    polytrain.load(of_keras.path).predict(
        str(tmp_path / "rows.parquet"),
        output=tmp_path / "out",
        keep=["id"],
        num_workers=1,
        rows_per_file=250,
    )
    stored = pq.read_table(tmp_path / "out")
    assert stored["id"].to_pylist() == table()["id"].to_pylist()
    x = table().select(FEATURES).to_pandas().to_numpy(dtype=np.float32)
    expected = of_keras.load_model().predict(x, verbose=0)
    assert np.stack(stored["prediction"].to_pylist()) == pytest.approx(expected, rel=1e-5)


def test_wrong_options_of_keras_are_named(of_keras: Result) -> None:
    for options, expected in (
        ({"model_fn": build}, "model_fn: .*isn't one of the options of predict with tensorflow"),
        ({"features": ["x9"]}, "features: the data has no column 'x9'"),
        ({"collate_fn": 3}, "collate_fn: 3 isn't a function"),
    ):
        with pytest.raises(InvalidJobError, match=expected):
            of_keras.predict(table(), **options)
    with pytest.raises(InvalidJobError, match="data: it has no column 'x2', which the model needs"):
        of_keras.predict(table().drop_columns(["x2"]))


def test_code_of_keras_that_is_not_here_is_named(tmp_path: Path) -> None:
    import keras

    from polytrain_tf.saved import Progress, load, save

    class Twice(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return 2 * x

    model = keras.Sequential([keras.Input((3,)), Twice()])
    model.compile(loss="mse")
    save(model, tmp_path, Progress())
    with pytest.raises(polytrain.CheckpointError, match=r"the class 'Twice'.*custom_objects"):
        load(tmp_path)
    assert load(tmp_path, {"Twice": Twice}).layers


def test_a_model_that_ends_its_process_does_not_end_the_program(of_torch: Result) -> None:
    def leave(model: Any, batch: Any) -> Any:
        sys.exit(0)

    with pytest.raises(RuntimeError, match=r"in leave(.|\n)*SystemExit: 0"):
        of_torch.predict(table(), model_fn=build, features=FEATURES, forward=leave, num_workers=1)
