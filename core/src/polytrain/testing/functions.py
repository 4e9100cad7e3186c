"""Training functions without a framework, which run in every backend."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polytrain
from polytrain import Checkpoint
from polytrain.collective import barrier, broadcast_from_rank_zero

STEPS = 4


def count_steps(config: Mapping[str, Any]) -> None:
    """Report STEPS times, each with a checkpoint that holds a file per writing rank and the step.

    Args:
        config: "fault", a `Fault` or None.
    """
    context = polytrain.get_context()
    rank = context.get_world_rank()
    writer = rank if context.every_rank_writes() else 0
    checkpoint = polytrain.get_checkpoint()
    done = int((Path(checkpoint.path) / "step-0").read_text()) if checkpoint else 0
    rows = sum(
        batch.num_rows
        for batch in polytrain.get_dataset_shard("train").iter_batches(batch_format="arrow")
    )
    for step in range(done + 1, STEPS + 1):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / f"step-{writer}").write_text(str(step))
            polytrain.report(
                {"step": step, "rows": rows, "resumed_from": done},
                checkpoint=Checkpoint.from_directory(directory),
            )
        if config["fault"] is not None:
            config["fault"].strike(rank=rank, step=step, attempt=context.get_attempt())


def broadcast() -> None:
    """Report what rank 0 has sent: nothing, a few bytes, and more than one message holds."""
    rank = polytrain.get_context().get_world_rank()
    received = []
    for size in (0, 1, 100_000):
        barrier()
        received.append(broadcast_from_rank_zero(bytes([7]) * size if rank == 0 else None))
    polytrain.report({"received": [None if it is None else [len(it), sum(it)] for it in received]})
