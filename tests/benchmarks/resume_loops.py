"""The training that bench_resume interrupts after most of an epoch."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KILLED_RANK = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a restart took."""

    first_batch: float
    """Seconds from the SIGKILL until all ranks have a batch that they had not finished before."""


def our_function() -> Callable[[dict[str, Any]], None]:
    """Reports a checkpoint, kills itself a batch later, and has that batch again.

    Made here so that it travels by value: no worker has this module.
    """

    def train(config: dict[str, Any]) -> None:
        import torch.distributed as dist

        import polytrain

        directory, rank = Path(config["directory"]), os.environ["RANK"]
        shard = polytrain.get_dataset_shard("train")
        wanted = {"batch_size": config["batch_size"]}
        batches = iter(shard.iter_batches(**wanted))
        if polytrain.get_checkpoint() is not None:
            ids = next(batches)["id"].tolist()
            note = {"time": time.time(), "ids": ids}
            (directory / f"back-{rank}").write_text(json.dumps(note))
            return
        for _ in range(int(config["part"] * shard.num_batches(**wanted))):
            next(batches)
        with tempfile.TemporaryDirectory() as name:
            # Rank 0's is the run's.
            checkpoint = polytrain.Checkpoint.from_directory(name) if rank == "0" else None
            polytrain.report({}, checkpoint=checkpoint)
        ids = next(batches)["id"].tolist()
        (directory / f"left-{rank}").write_text(json.dumps(ids))
        dist.barrier()
        if rank == _KILLED_RANK:
            (directory / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in batches:
            pass

    return train


def ray_function() -> Callable[[dict[str, Any]], None]:
    """The same for Ray Train, which begins anew: what was there before is passed over."""

    def train(config: dict[str, Any]) -> None:
        import ray.train
        import torch.distributed as dist

        directory, rank = Path(config["directory"]), os.environ["RANK"]
        shard = ray.train.get_dataset_shard("train")
        batches = iter(shard.iter_batches(batch_size=config["batch_size"]))
        rows = 0
        while rows < config["part"] * config["rows"] / dist.get_world_size():
            rows += len(next(batches)["id"])
        next(batches)
        if (directory / "killed").exists():
            (directory / f"back-{rank}").write_text(json.dumps({"time": time.time()}))
            return
        dist.barrier()
        if rank == _KILLED_RANK:
            (directory / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in batches:
            pass

    return train


def resume(directory: Path, workers: int) -> Resume:
    """What a training function has noted in its directory."""
    killed = float((directory / "killed").read_text())
    notes = {note.name: json.loads(note.read_text()) for note in directory.glob("back-*")}
    assert len(notes) == workers
    for left in directory.glob("left-*"):
        # Going on quickly, but elsewhere, would be no achievement.
        assert notes[left.name.replace("left", "back")]["ids"] == json.loads(left.read_text())
    return Resume(first_batch=max(note["time"] for note in notes.values()) - killed)
