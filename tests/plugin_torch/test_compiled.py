"""`torch.compile` of a prepared model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from polytrain.testing.local_world import run_world
from polytrain_torch import Torch


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_trains_as_one_that_is_not(tmp_path: Path, world_size: int) -> None:
    """Over several steps: the first ones build DDP's buckets anew."""

    def train(config: Any) -> None:
        import torch

        import polytrain
        from polytrain_torch import prepare_model

        def trained(*, is_compiled: bool) -> list[float]:
            torch.manual_seed(0)
            model = prepare_model(
                torch.nn.Sequential(
                    torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
                )
            )
            steps = torch.compile(model, backend="aot_eager") if is_compiled else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rank = polytrain.get_context().get_world_rank()
            x = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(rank))
            for batch in x:
                optimizer.zero_grad()
                (steps(batch)[:, 0] - batch.sum(1)).square().mean().backward()
                optimizer.step()
            return [float(value) for each in model.parameters() for value in each.flatten()]

        polytrain.report(
            {"plain": trained(is_compiled=False), "compiled": trained(is_compiled=True)}
        )

    record = run_world(
        Torch(timeout_s=60),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        world_size=world_size,
        training_function=train,
        training_config={},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    for rank in record.ranks:
        metrics = rank.reports[0].metrics
        assert metrics["compiled"] == pytest.approx(metrics["plain"], abs=1e-6)
