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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recovery_steps import StepOf

_KILLED_RANK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds since something was killed."""

    first_line: float
    """Until the training function has begun again on all ranks."""

    first_step: float
    """Until a step that needs all ranks is done on all of them."""


def training_function(
    step_of: StepOf, rank_of: Callable[[], int], victim_of: Callable[[], int]
) -> Callable[[dict[str, Any]], None]:
    """A training function whose rank 1 kills after a step, and that notes when it is there again.

    Made here so that it travels by value: no worker has this module.

    Args:
        step_of: builds what is trained.
        rank_of: tells the rank.
        victim_of: finds the process that is to be lost.
    """
    killed_rank = _KILLED_RANK

    def train(config: dict[str, Any]) -> None:
        begun = time.time()
        directory, rank = Path(config["directory"]), rank_of()
        # No rank is killed before all have passed here: that takes a step of all of them.
        restarted = (directory / "killed").exists()
        step = step_of(rank)
        step()
        stepped = time.time()
        if restarted:
            (directory / f"back-{rank}").write_text(json.dumps([begun, stepped]))
            return
        if rank == killed_rank:
            victim = victim_of()
            (directory / "killed").write_text(repr(time.time()))
            os.kill(victim, signal.SIGKILL)
        while True:
            step()

    return train


def killed_at(directory: Path) -> float:
    """When the training function has killed, in seconds since the epoch."""
    return float((directory / "killed").read_text())


def recovery(directory: Path, workers: int) -> Recovery:
    """What the training function has noted in its directory."""
    killed = killed_at(directory)
    notes = [json.loads(note.read_text()) for note in directory.glob("back-*")]
    assert len(notes) == workers
    begun, stepped = zip(*notes, strict=True)
    return Recovery(first_line=max(begun) - killed, first_step=max(stepped) - killed)


def main() -> None:
    """What a script for torchrun does before it trains."""
    import torch.distributed as dist
    from recovery_steps import torch_step

    dist.init_process_group("gloo")
    train = training_function(torch_step(), dist.get_rank, os.getpid)
    train({"directory": sys.argv[1]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
