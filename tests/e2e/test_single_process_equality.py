"""Distributed runs end where the framework's own single-process run ends.

Workers import this module for its functions: what they don't need is imported where it is used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest

import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer


@pytest.fixture(scope="module")
def data() -> dict[str, pd.DataFrame]:
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=0)
    return {"train": frame.iloc[:427], "valid": frame.iloc[427:]}


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_torch_gradients(quiet: RunConfig, num_workers: int) -> None:
    """One step of DDP over all rows is one step of one process over all rows."""
    rows = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    table = {f"x{i}": rows[:, i] for i in range(3)} | {"y": rows[:, 3]}
    result = make_trainer(
        "torch",
        one_step,
        datasets={"train": table},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=quiet,
    ).fit()
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    predicted = model(torch.tensor(rows[:, :3]))[:, 0]
    torch.nn.functional.mse_loss(predicted, torch.tensor(rows[:, 3])).backward()
    expected = model.weight - 0.1 * model.weight.grad
    assert np.allclose(result.metrics["weight"], expected.detach().numpy()[0], atol=1e-6)


def one_step() -> None:
    import torch

    from polytrain_torch import prepare_model

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    parallel = prepare_model(model)
    [batch] = polytrain.get_dataset_shard("train").iter_torch_batches(batch_size=60)
    labels = batch.pop("y")
    predicted = parallel(torch.stack(list(batch.values()), dim=1))[:, 0]
    torch.nn.functional.mse_loss(predicted, labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    polytrain.report({"weight": model.weight[0].tolist()})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_xgboost_metrics(quiet: RunConfig, data: dict[str, pd.DataFrame], num_workers: int) -> None:
    """What is reported is what the model that comes out gives on all rows of the evaluation set."""
    import xgboost
    from sklearn.metrics import log_loss, roc_auc_score

    result = make_trainer(
        "xgboost",
        params={"objective": "binary:logistic", "eval_metric": ["auc", "logloss"]},
        num_boost_round=12,
        label="target",
        datasets=data,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=quiet,
    ).fit()
    valid = xgboost.DMatrix(data["valid"].drop(columns="target"))
    booster = result.load_model()
    predicted, truth = booster.predict(valid), data["valid"]["target"]
    assert len(result.history) == booster.num_boosted_rounds() == 12
    assert result.metrics["valid-auc"] == pytest.approx(roc_auc_score(truth, predicted))
    assert result.metrics["valid-logloss"] == pytest.approx(log_loss(truth, predicted), abs=1e-6)


def test_xgboost_inline_is_xgboost(quiet: RunConfig, data: dict[str, pd.DataFrame]) -> None:
    import xgboost

    params = {"objective": "binary:logistic", "max_depth": 4}
    result = make_trainer(
        "xgboost",
        params=params,
        num_boost_round=10,
        label="target",
        datasets={"train": data["train"]},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=quiet,
    ).fit()
    train = xgboost.QuantileDMatrix(
        data["train"].drop(columns="target"), label=data["train"]["target"]
    )
    own = xgboost.train(params, train, num_boost_round=10)
    assert result.load_model().get_dump() == own.get_dump()


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_early_stopping_in_the_same_round(
    quiet: RunConfig, data: dict[str, pd.DataFrame], num_workers: int
) -> None:
    """LightGBM's workers, left alone, would stop in different rounds and wait for ever."""
    result = make_trainer(
        "lightgbm",
        params={"objective": "binary", "metric": "binary_logloss", "learning_rate": 0.5},
        num_boost_round=100,
        early_stopping_rounds=4,
        label="target",
        datasets=data,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=quiet,
    ).fit()
    losses = [metrics["valid-binary_logloss"] for metrics in result.history]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == best + 4 < 100
    booster = result.load_model()
    assert booster.best_iteration == best
    predicted = booster.predict(data["valid"].drop(columns="target"))
    truth = data["valid"]["target"].to_numpy()
    loss = -np.mean(truth * np.log(predicted) + (1 - truth) * np.log(1 - predicted))
    assert loss == pytest.approx(min(losses), abs=1e-9)


def collect_rows() -> None:
    shard = polytrain.get_dataset_shard("train")
    seen = [int(value) for batch in shard.iter_batches(batch_size=7) for value in batch["id"]]
    again = [int(value) for batch in shard.iter_batches(batch_size=7) for value in batch["id"]]
    assert seen == again
    print(f"SEEN {seen}")
    polytrain.report({"rows": len(seen)})


def in_ray(*tables: Any) -> Any:
    import ray.data

    return ray.data.from_arrow([*tables])  # type: ignore[no-untyped-call]


# `core/test_ray_stream` has rows of Ray's in `make test`.
@pytest.mark.sweep
@pytest.mark.parametrize(
    "source",
    [
        *("pandas", "arrow", "numpy", "parquet", "csv"),
        pytest.param("ray", marks=[pytest.mark.on_ray, pytest.mark.only_in_sweep]),
    ],
)
def test_every_row_is_on_one_rank(
    quiet: RunConfig,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    source: str,
) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    ids = np.arange(101)
    table = pa.table({"id": ids})
    files = tmp_path_factory.mktemp("data with spaces")
    if source == "parquet":
        pyarrow.parquet.write_table(table.slice(0, 60), files / "a.parquet", row_group_size=7)
        pyarrow.parquet.write_table(table.slice(60), files / "b.parquet")
    if source == "csv":
        pyarrow.csv.write_csv(table, files / "ids.csv")
    data = {
        "pandas": lambda: pd.DataFrame({"id": ids}),
        "arrow": lambda: table,
        "numpy": lambda: {"id": ids},
        "parquet": lambda: str(files / "*.parquet"),
        "csv": lambda: files / "ids.csv",
        "ray": lambda: in_ray(table.slice(0, 30), table.slice(30)),
    }[source]()
    make_trainer(
        "reference",
        collect_rows,
        datasets={"train": data},
        scaling_config=ScalingConfig(num_workers=3),
        run_config=dataclasses.replace(quiet, progress=False),
    ).fit()
    output, _ = capfd.readouterr()
    seen = [
        int(i)
        for line in output.splitlines()
        if "SEEN" in line
        for i in line.split("[")[1].strip("]").split(",")
    ]
    assert sorted(seen) == list(range(101))
    assert output.count("SEEN") == 3
