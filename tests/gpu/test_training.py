"""A run on a GPU whose worker is killed ends in the same bits as one that isn't."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.journals import journal

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer

ROWS, STEPS, KILLED_AT = 240, 15, 8


def train(config: dict[str, Any]) -> None:
    """The last rank dies once, after a step and before it reports it."""
    import torch
    import torch.distributed as dist

    from polytrain import get_context, get_dataset_shard
    from polytrain.torch import TrainingState, get_device, prepare_model

    # cuBLAS reads it when it is first used.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    context = get_context()
    device = get_device()
    torch.manual_seed(1)
    model = prepare_model(
        torch.nn.Sequential(
            torch.nn.Linear(12, 64),
            torch.nn.LayerNorm(64),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(64, 1),
        ),
        parallel_strategy=config["strategy"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    # At first gradients overflow; then the scale grows after every second step.
    scaler = torch.amp.GradScaler(
        device.type, init_scale=2.0**24, growth_interval=2, enabled=config["amp"]
    )
    state = TrainingState(model=model, optimizer=optimizer, scaler=scaler)
    done = state.restore()
    dies = (
        config["dies"]
        and context.get_attempt() == 0
        and context.get_world_rank() == context.get_world_size() - 1
    )
    step = done.get("step", 0)
    for epoch in range(done.get("epoch", 0), 3):
        for batch in get_dataset_shard().iter_torch_batches(
            batch_size=48 // context.get_world_size(), dtypes=torch.float32
        ):
            step += 1
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16, enabled=config["amp"]):
                loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if dies and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            state.report(
                {
                    "loss": loss.item(),
                    "scale": scaler.get_scale(),
                    "attempt": context.get_attempt(),
                    "device": str(next(model.parameters()).device),
                    "batch": str(batch["x"].device),
                    "group": dist.get_backend(),
                },
                step=step,
                epoch=epoch,
            )


def fit(path: Path, workers: int, **config: Any) -> Result:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 12), dtype=np.float32)
    return make_trainer(
        "torch",
        train,
        train_loop_config=config,
        # NCCL refuses two ranks on one GPU.
        process_group=None if workers == 1 else "gloo",
        datasets={"train": {"x": list(x), "y": x.sum(1)}},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=True, cluster="local"),
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "AMP"])
@pytest.mark.parametrize(
    ("workers", "strategy"),
    [(1, "ddp"), (1, "fsdp"), (2, "ddp")],
    ids=["DDP over NCCL", "FSDP2 over NCCL", "two ranks over gloo"],
)
def test_a_kill_changes_no_bit(
    tmp_path: Path, share_gpu: Callable[[int], None], workers: int, strategy: str, amp: bool
) -> None:
    share_gpu(workers)
    whole, killed = (
        fit(tmp_path / name, workers, strategy=strategy, amp=amp, dies=name == "killed")
        for name in ("whole", "killed")
    )
    assert [each["attempt"] for each in killed.history] == [0] * 7 + [1] * 8
    for name in ("loss", "scale"):
        assert [each[name] for each in killed.history] == [each[name] for each in whole.history]
    weights = whole.load_model()
    assert all(value.equal(weights[name]) for name, value in killed.load_model().items())
    if workers > 1:
        [asked] = journal(tmp_path / "killed" / "run", "SurvivorsAsked")
        assert (asked["rank"], asked["reason"]) == (None, "its tensors are on a device")
    group = "nccl" if workers == 1 else "gloo"
    for name, expected in (("device", "cuda:0"), ("batch", "cuda:0"), ("group", group)):
        assert {each[name] for each in killed.history} == {expected}
    if amp:
        scales = [each["scale"] for each in whole.history]
        assert scales[0] < 2.0**24, "no gradient overflowed"
        after = scales[KILLED_AT - 1 :]
        assert any(later > one for one, later in pairwise(after)), "the scale didn't grow"
