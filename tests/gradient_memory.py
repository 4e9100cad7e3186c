"""The memory that gradients take: of virtual workers, or of DDP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytrain import RunConfig, ScalingConfig, make_trainer

WIDTH, LAYERS = 512, 8
"""Gradients are large beside everything else that a step makes."""


def report_peak(config: Mapping[str, Any]) -> None:
    """Report the peak of a step's memory, and what DDP keeps, in sets of the model's gradients."""
    import os

    import torch
    from torch.profiler import ProfilerActivity, profile

    from polytrain import report
    from polytrain.torch import micro_batches, prepare_data_loader, prepare_model
    from polytrain_torch.virtual_workers import gradients as virtual_gradients

    # As of a model that is large beside a bucket: here each layer has one.
    virtual_gradients._BUCKET = virtual_gradients._BUCKET_AFTERWARDS = WIDTH * WIDTH * 4
    if config["sockets"]:
        # As on several nodes.
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    model = prepare_model(
        torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.utils.data.TensorDataset(torch.ones(64, WIDTH))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=1))
    batches = iter(loader)

    def step() -> None:
        for (x,) in micro_batches(next(batches)):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    # DDP makes its buckets anew after the first step, and ranks are compared after some.
    for _ in range(5):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    most = torch.tensor(peak / sum(each.nbytes for each in model.parameters()))
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    report({"sets": most.item()})


def peak(
    storage: Path, workers: int, virtual_workers: int | None, *, sockets: bool = False
) -> float:
    """Return the most sets of gradients that a step of any rank has, beside DDP's own buckets.

    Args:
        storage: a directory for the run.
        workers: number of workers.
        virtual_workers: number of virtual workers; None for DDP.
        sockets: sum by messages, as between nodes. The two buckets that another thread has while it
            sends and receives aren't counted.
    """
    result = make_trainer(
        "torch",
        report_peak,
        train_loop_config={"sockets": sockets},
        scaling_config=ScalingConfig(
            num_workers=workers, virtual_workers=virtual_workers, cluster="local"
        ),
        run_config=RunConfig(storage_path=storage, progress=False),
    ).fit()
    return float(result.metrics["sets"])
