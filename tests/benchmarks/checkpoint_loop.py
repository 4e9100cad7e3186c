"""What `bench_checkpoint` lets everybody do: steps, and a checkpoint now and then."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 20
EVERY = 4
"""Steps from one checkpoint to the next. The first comes at half of that, and none at the end."""

Report = Callable[[dict[str, Any], str | None], None]
"""Reports metrics, and the checkpoint in a directory, which is the callee's if there is one."""


def training_function(report: Report) -> Callable[[dict[str, Any]], None]:
    """The function. Made here so that it travels by value: no worker has this module."""
    steps, every = STEPS, EVERY

    def train(config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        weights = torch.rand(config["bytes"] // 4)
        rank = int(os.environ["RANK"])
        a = torch.rand(700, 700)
        saves, stalls = [], []
        begun = time.perf_counter()
        for step in range(steps):
            # Work that takes as long for everybody, and doesn't wait for anybody.
            for _ in range(config["products"]):
                a = torch.nn.functional.normalize(a @ a)
            directory = None
            if step % every == every // 2 and rank == 0:
                directory = tempfile.mkdtemp(dir=config["directory"])
                before = time.perf_counter()
                torch.save(weights, Path(directory, "weights.pt"))
                saves.append(time.perf_counter() - before)
            before = time.perf_counter()
            report({"step": step}, directory)
            if directory is not None:
                stalls.append(time.perf_counter() - before)
        if rank == 0:
            found = {"saves": saves, "stalls": stalls, "loop": time.perf_counter() - begun}
            Path(config["directory"], "result.json").write_text(json.dumps(found))

    return train
