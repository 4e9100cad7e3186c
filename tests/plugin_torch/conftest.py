"""Runs of torch's in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polytrain import CheckpointConfig, RunConfig, ScalingConfig, make_trainer

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def fit(function: Callable[[], None], *, written_by: Any = "rank_0", **options: Any) -> Any:
        return make_trainer(
            "torch",
            function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(
                storage_path=tmp_path,
                progress=False,
                checkpoint_config=CheckpointConfig(written_by=written_by),
            ),
            **options,
        ).fit()

    return fit
