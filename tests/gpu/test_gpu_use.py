"""The use of a rank's GPU is in the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.journals import journal

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

HELD = 1 << 30


def compute(config: dict[str, Any]) -> None:
    """Compute for some windows of the measurement."""
    import time

    import torch

    from polytrain import report
    from polytrain.torch import get_device

    held = torch.ones(config["held"], dtype=torch.uint8, device=get_device())
    factor = torch.ones(2048, 2048, device=get_device())
    began = time.monotonic()
    while time.monotonic() - began < 2:
        value = (factor @ factor).sum().item()
        report({"value": value})
    del held


def test_the_use_of_a_gpu_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install '.[gpu-metrics]'")
    result = make_trainer(
        "torch",
        compute,
        train_loop_config={"held": HELD},
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True, cluster="local"),
        run_config=RunConfig(
            storage_path=tmp_path,
            progress=False,
            failure_config=FailureConfig(straggler_window_s=0.4),
        ),
    ).fit()
    [joined] = journal(result.path, "Joined")
    # In some containers the driver doesn't say which GPU this is.
    assert "GPU" in joined["device"] or "NVIDIA" in joined["device"]
    gpus = [gpu for load in journal(result.path, "Load") for [gpu] in load["gpus"]]
    assert max(share or 0 for share, _ in gpus) > 0.1
    assert max(memory or 0 for _, memory in gpus) >= HELD
