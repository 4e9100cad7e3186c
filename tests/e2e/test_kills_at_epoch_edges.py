"""A worker killed at the first and the last step of epochs, through every front end.

Nothing of the epoch is saved yet, or all of it is trained and its checkpoint isn't written: places
where rows are easily trained twice or not at all. The final weights are those of a run that nobody
disturbed, and so is the reported history, where the front end's own metrics allow it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e import (
    boosters,
    test_accelerate,
    test_horovod,
    test_keras,
    test_lightning_sweep,
    test_torch_state,
    test_transformers_sweep,
    torch_runs,
)
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, FailureConfig, Result, RunConfig

pytestmark = pytest.mark.sweep

Ended = tuple[Result, Any]
"""A run's result, and its final weights or the model's bytes."""

Fit = Callable[[RunConfig, Path, int], Ended]
"""Trains in a directory; rank 1 is killed in the first attempt, at this step counted from 1."""


def by_torch(run: RunConfig, output: Path, step: int) -> Ended:
    result = test_torch_state.fit(run, dies_at=step)
    return result, flat(test_torch_state.weights(result))


def by_lightning(run: RunConfig, output: Path, step: int) -> Ended:
    result = test_lightning_sweep.trained(run, output, "default_root_dir", dies_at=step)
    return result, flat(torch.load(output / "weights.pt", weights_only=True))


def by_accelerate(run: RunConfig, output: Path, step: int) -> Ended:
    result = test_accelerate.fit(run, dies_at=step)
    return result, flat(test_accelerate.weights(result))


def by_transformers(run: RunConfig, output: Path, step: int) -> Ended:
    result = test_transformers_sweep.trained(run, output, "output_dir", dies_at=step)
    return result, flat(torch.load(output / "weights.pt", weights_only=True))


def by_keras(run: RunConfig, output: Path, step: int) -> Ended:
    result = test_keras.fit(run, dies_at=step)
    return result, test_keras.weights(result).tolist()


def by_keras_on_torch(run: RunConfig, output: Path, step: int) -> Ended:
    config = {**test_keras.DATA, "dies_at": step}
    result = torch_runs.fit(run, test_keras.train_on_torch, config)
    return result, result.metrics["weights"]


def by_horovod(run: RunConfig, output: Path, step: int) -> Ended:
    output.mkdir()
    config = {"log": str(output), "dies_at": step}
    result = test_horovod.fit(output, test_horovod.elastic, 2, config, max_failures=1)
    return result, flat(result.load_model())


def by_booster(backend: str) -> Fit:
    def fit(run: RunConfig, output: Path, step: int) -> Ended:
        run = dataclasses.replace(
            run,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=3),
        )
        result = boosters.fit(
            run,
            boosters.a_table(),
            2,
            backend=backend,
            params=boosters.DRAWING[backend],
            callbacks=[boosters.dying(backend, step)],
        )
        return result, boosters.model_of(result)

    return fit


def flat(weights: dict[str, torch.Tensor]) -> list[float]:
    return [float(each) for tensor in weights.values() for each in tensor.flatten()]


FITS: dict[str, tuple[Fit, tuple[int, ...]]] = {
    "torch": (by_torch, (1, 6, 7, 24)),
    "Lightning": (by_lightning, (1, 6, 7, 18)),
    "Accelerate": (by_accelerate, (1, 6, 7, 24)),
    "Transformers": (by_transformers, (1, 6, 7, 18)),
    "Keras": (by_keras, (1, 4, 5, 20)),
    "Keras on torch": (by_keras_on_torch, (1, 8, 9, 32)),
    "Horovod": (by_horovod, (1, 6, 7, 18)),
    "XGBoost": (by_booster("xgboost"), (1, 3, 4, boosters.ROUNDS)),
    "LightGBM": (by_booster("lightgbm"), (1, 3, 4, boosters.ROUNDS)),
}
"""Each with the first and last step of epoch 0, the first of epoch 1, and the run's last.

Boosters have rounds: the first, the one that is saved first, the next, and the last.
"""

EDGES = ("first of epoch 0", "last of epoch 0", "first of epoch 1", "last of the run")

IN_TEST = {
    ("torch", "last of epoch 0"),
    ("Accelerate", "last of the run"),
    ("XGBoost", "last of the run"),
    ("LightGBM", "first of epoch 0"),
}
"""What `make test` tries too. Tests of the other front ends kill them at such places."""

WHOLE_HISTORY = {"torch", "Accelerate", "Keras", "XGBoost", "LightGBM"}
"""What reports the same after a kill. Lightning forgets the last validation's metrics, Transformers
reports its attempt's times and mean loss, and Horovod's function commits by batches of an attempt.
"""

OF_AN_ATTEMPT = {"steps"}
"""Metrics by which the training functions count what one attempt did."""


@pytest.mark.parametrize(
    ("front_end", "edge"),
    [
        (front_end, edge) if (front_end, edge) in IN_TEST else only_in_sweep(front_end, edge)
        for front_end in FITS
        for edge in EDGES
    ],
)
def test_a_kill_at_an_edge_changes_nothing(
    quiet: RunConfig, tmp_path: Path, front_end: str, edge: str
) -> None:
    fit, steps = FITS[front_end]
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", -1)
    killed, found = fit(quiet, tmp_path / "killed", steps[EDGES.index(edge)])
    assert (undisturbed.restarts, killed.restarts) == (0, 1)
    assert undisturbed.history
    if "Keras" in front_end:
        # Keras adds up gradients in an order that may differ by run.
        np.testing.assert_allclose(found, expected, atol=1e-6)
    else:
        assert found == expected
    if front_end in WHOLE_HISTORY:
        assert reported(killed) == [
            pytest.approx(metrics, abs=1e-5) for metrics in reported(undisturbed)
        ]


def reported(result: Result) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in metrics.items() if name not in OF_AN_ATTEMPT}
        for metrics in result.history
    ]
