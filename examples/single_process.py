"""The same models in one process, with each framework alone, for comparison."""

from __future__ import annotations

from typing import Any

import pandas as pd

Data = dict[str, pd.DataFrame]


def xgboost_logloss(params: dict[str, Any], rounds: int, data: Data) -> float:
    """Log loss of the evaluation rows after the last round of `xgboost.train`."""
    import xgboost

    train, valid = (
        xgboost.DMatrix(data[name].drop(columns="target"), label=data[name]["target"])
        for name in ("train", "valid")
    )
    history: dict[str, Any] = {}
    xgboost.train(
        params,
        train,
        rounds,
        evals=[(valid, "valid")],
        evals_result=history,
        verbose_eval=False,
    )
    return float(history["valid"]["logloss"][-1])


def lightgbm_logloss(params: dict[str, Any], rounds: int, data: Data) -> float:
    """Log loss of the evaluation rows after the last round of `lightgbm.train`."""
    import lightgbm

    train = lightgbm.Dataset(data["train"].drop(columns="target"), label=data["train"]["target"])
    valid = lightgbm.Dataset(
        data["valid"].drop(columns="target"), label=data["valid"]["target"], reference=train
    )
    history: dict[str, Any] = {}
    lightgbm.train(
        {"verbosity": -1, **params},
        train,
        rounds,
        valid_sets=[valid],
        valid_names=["valid"],
        callbacks=[lightgbm.record_evaluation(history)],
    )
    return float(history["valid"]["binary_logloss"][-1])


def torch_network() -> Any:
    """A small network for the digits; the same weights in every process."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def torch_accuracy(epochs: int, data: Data) -> float:
    """Share of right answers after training with batches of all workers' size together."""
    import torch

    network = torch_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    train, valid = (_tensors(data[name]) for name in ("train", "valid"))
    for _ in range(epochs):
        for features, labels in zip(*(tensor.split(32) for tensor in train), strict=True):
            loss = torch.nn.functional.cross_entropy(network(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    features, labels = valid
    return float((network(features).argmax(dim=1) == labels).float().mean())


def _tensors(frame: pd.DataFrame) -> tuple[Any, Any]:
    import torch

    features = torch.tensor(frame.drop(columns="target").to_numpy(), dtype=torch.float32) / 16
    return features, torch.tensor(frame["target"].to_numpy())


def keras_network() -> Any:
    """A small network for the digits; the same weights in every process."""
    import keras

    keras.utils.set_random_seed(0)
    network = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Rescaling(1 / 16),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    network.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def keras_accuracy(epochs: int, data: Data) -> float:
    """Share of right answers after training with batches of all workers' size together."""
    network = keras_network()
    (features, labels), valid = (
        (frame.drop(columns="target").to_numpy(), frame["target"].to_numpy())
        for frame in (data["train"], data["valid"])
    )
    network.fit(features, labels, batch_size=32, epochs=epochs, verbose=0, shuffle=False)
    return float(network.evaluate(*valid, verbose=0)[1])
