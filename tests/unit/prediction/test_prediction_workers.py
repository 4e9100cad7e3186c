"""How many workers predict, and the errors of a backend that is wrong about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from polytrain import Checkpoint
from polytrain.backends.reference import Reference
from polytrain.policy.scaling import AvailableClusters
from polytrain.prediction.predict import PredictionRequest, predict
from polytrain_plugins import Device, Job


class WithoutDemand(Reference):
    def demand(self, job: Job) -> Any:
        return None


class OnGpus(Reference):
    capabilities: ClassVar[Any] = replace(Reference.capabilities, devices=frozenset({Device.GPU}))


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    (tmp_path / "columns.json").write_text('["x"]')
    (tmp_path / "rounds.json").write_text("1")
    np.save(tmp_path / "coefficients.npy", np.ones(2))
    return Checkpoint(tmp_path)


def asked(backend: Reference, model: Checkpoint, **options: Any) -> PredictionRequest:
    data = {"x": np.arange(4.0)}
    return PredictionRequest(backend=backend, checkpoint=model, data=data, **options)


def test_a_backend_without_a_demand_is_named(model: Checkpoint) -> None:
    with pytest.raises(TypeError, match=r"WithoutDemand\.demand returned None\. Return a Demand\."):
        predict(asked(WithoutDemand(label="y"), model, num_workers=2))


def test_fewer_workers_than_were_asked_for_are_announced(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def workers(*_: Any, count: int, **__: Any) -> Any:
        raise InterruptedError(f"{count} worker")

    machine = AvailableClusters(
        machine={"CPU": 2, "GPU": 2},
        has_gpu_device=True,
        ray_is_initialized=False,
        ray_address=None,
        ray_datasets=(),
        function_uses_ray=False,
    )
    monkeypatch.setattr("polytrain.prediction.predict.available_clusters", lambda _: machine)
    monkeypatch.setattr("polytrain.prediction.predict.visible_gpus", lambda _: ("0", "1"))
    monkeypatch.setattr("polytrain.prediction.predict.LocalWorkers", workers)
    for most in (2, 8):
        with pytest.raises(InterruptedError):
            predict(asked(OnGpus(label="y"), model, num_workers=most, use_gpu=True))
    assert caplog.messages == ["num_workers=8: each worker has a GPU of its own, so there are 2."]
