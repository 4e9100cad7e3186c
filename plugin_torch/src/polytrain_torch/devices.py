"""Makes the GPUs of all workers of a node visible to each of them, as under `torchrun`.

Ray shows each worker only its own GPU. But libraries use the GPU with index `LOCAL_RANK`, and NCCL
copies directly from one GPU to another only if a process sees both.
"""

from __future__ import annotations

import os

import torch

from polytrain_plugins import Member, World

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPUS = "gpus"


def offered(me: Member) -> dict[str, str]:
    """Return the details that this worker offers to the others: its own GPUs."""
    return {_GPUS: os.environ.get(_VISIBLE, "")} if me.gpus else {}


def own_device(world: World) -> torch.device | None:
    """Make the worker's (first) GPU the current one, and return it; None if it has none.

    CUDA must not have been used before in this process.

    Raises:
        RuntimeError: the worker has a GPU, and its torch is built without support for GPUs.
    """
    if not world.me.gpus:
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        raise RuntimeError(
            f"use_gpu is True, and torch {torch.__version__} on {world.me.host} is built for CPUs "
            "only. Install a build of torch for GPUs there, or use use_gpu=False."
        )
    index = show_gpus(world)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def show_gpus(world: World) -> int:
    """Make the GPUs of all workers of the node visible; return the index of this worker's (first).

    CUDA must not have been used before in this process.
    """
    visible, index = seen_by(world)
    if visible is not None and world.me.gpus:
        os.environ[_VISIBLE] = visible
    return index


def seen_by(world: World) -> tuple[str | None, int]:
    """Return CUDA_VISIBLE_DEVICES for this rank, and the index in it of the rank's first GPU.

    A GPU that several workers share is listed once. The value is None if no GPUs were assigned:
    then all workers see all GPUs of the machine.
    """
    node = sorted(
        (member.local_rank, str(offer.details.get(_GPUS, "")).split(","))
        for member, offer in zip(world.members, world.offers, strict=True)
        if member.node_rank == world.me.node_rank
    )
    if not all(gpu for _, gpus in node for gpu in gpus):
        return None, world.me.local_rank
    visible = list(dict.fromkeys(gpu for _, gpus in node for gpu in gpus))
    return ",".join(visible), visible.index(node[world.me.local_rank][1][0])


def current_device() -> torch.device:
    """Return this process's GPU, or the CPU without one."""
    if torch.cuda.is_available() and os.environ.get("POLYTRAIN_GPUS", "0") != "0":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
