"""The training that bench_recovery interrupts. Run as a script, it is what torchrun restarts.

Imports nothing but the standard library at first: all of it would be the restart's to repeat.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds since one of the workers was killed."""

    first_line: float
    """Until the training function has begun again on all ranks."""

    all_reduce: float
    """Until the first step of a DDP model, with its all-reduce, is done on all ranks."""


def training_function() -> Callable[[dict[str, Any]], None]:
    """A training function that kills rank 1 after a step, and notes when it is there again.

    Made here so that it travels by value: no worker has this module.
    """

    def train(config: dict[str, Any]) -> None:
        begun = time.time()
        directory, rank = Path(config["directory"]), os.environ["RANK"]
        # No rank is killed before all have passed here: that takes a step of all of them.
        restarted = (directory / "killed").exists()

        import torch
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        model(torch.ones(4, 8)).sum().backward()
        stepped = time.time()
        if restarted:
            (directory / f"back-{rank}").write_text(json.dumps([begun, stepped]))
            return
        if rank == "1":
            (directory / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            model(torch.ones(4, 8)).sum().backward()

    return train


def recovery(directory: Path, workers: int) -> Recovery:
    """What the training function has noted in its directory."""
    killed = float((directory / "killed").read_text())
    notes = [json.loads(note.read_text()) for note in directory.glob("back-*")]
    assert len(notes) == workers
    begun, stepped = zip(*notes, strict=True)
    return Recovery(first_line=max(begun) - killed, all_reduce=max(stepped) - killed)


def main() -> None:
    """What a script for torchrun does before it trains."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    training_function()({"directory": sys.argv[1]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
