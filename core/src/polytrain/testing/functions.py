"""Training functions without a framework, which run in every backend."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import polytrain
from polytrain import Checkpoint
from polytrain.collective import barrier, broadcast_from_rank_zero
from polytrain.testing.processes import is_alive, title
from polytrain_plugins import Backend

STEPS = 4

_OTHER_ADDRESS = "127.0.0.2"
"""Another address of this machine than the one at which ranks offer to be reached."""

_OF_PYTHON = re.compile("resource_tracker|forkserver")
"""Processes of `multiprocessing` that end with the one that they serve."""

_CONNECTED_WITHIN_S = 0.5
"""On one machine a connection is made at once, or never."""


def count_steps(config: Mapping[str, Any]) -> None:
    """Report STEPS times, each with a checkpoint that holds a file per writing rank and the step.

    Args:
        config: "fault", a `Fault` or None; "validation", whether checkpoints are validated.
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
                validation=config.get("validation", False),
            )
        if config["fault"] is not None:
            config["fault"].inject(rank=rank, step=step, attempt=context.get_attempt())


def validate_step(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the step that is in a checkpoint of `count_steps`, and the process that read it."""
    with checkpoint.as_directory() as directory:
        step = int((Path(directory) / "step-0").read_text())
    return {"validated_step": step, "validated_by": os.getpid()}


@dataclass(frozen=True)
class LoadsModel:
    """A validation function that loads the model of declarative training."""

    backend: Backend

    def __call__(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return whether there is a model."""
        with checkpoint.as_directory() as directory:
            return {"model_loaded": self.backend.engine().load(Path(directory)) is not None}


def broadcast() -> None:
    """Report what rank 0 has sent: nothing, a few bytes, and more than one message holds."""
    rank = polytrain.get_context().get_world_rank()
    received = []
    for size in (0, 1, 100_000):
        barrier()
        received.append(broadcast_from_rank_zero(bytes([7]) * size if rank == 0 else None))
    polytrain.report({"received": [None if it is None else [len(it), sum(it)] for it in received]})


def list_ports() -> None:
    """Report the ports at which this process and its helpers listen, and those open to others."""
    ports = [*listening_ports()]
    polytrain.report({"ports": ports, "open": [*filter(_is_reached_anywhere, ports)]})


def listening_ports() -> Iterator[int]:
    """Yield the ports at which this process listens, or one that it has started."""
    for process in (psutil.Process(), *helpers()):
        with suppress(psutil.NoSuchProcess):
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    yield each.laddr.port


def helpers() -> list[psutil.Process]:
    """Return the live processes that this process has started, without Python's own."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if is_alive(each) and not _OF_PYTHON.search(title(each))]


def _is_reached_anywhere(port: int) -> bool:
    """Whether a port on this machine accepts connections at another address than 127.0.0.1."""
    try:
        socket.create_connection((_OTHER_ADDRESS, port), timeout=_CONNECTED_WITHIN_S).close()
    except OSError:
        return False
    return True
