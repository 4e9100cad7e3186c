"""Which GPUs a worker sees: those of all workers of its node, as under `torchrun`.

Ray shows every worker its own alone. But libraries take the GPU that has the number `LOCAL_RANK`,
and NCCL copies straight from one GPU to another only if a process sees both.
"""

from __future__ import annotations

import os

import torch

from polytrain_plugins import Member, World

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPUS = "gpus"


def offered(me: Member) -> dict[str, str]:
    """What the others have to know: the worker's own GPUs."""
    return {_GPUS: os.environ.get(_VISIBLE, "")} if me.gpus else {}


def own_device(world: World) -> torch.device | None:
    """The worker's GPU, its first if it has several, which becomes the current one; None without.

    CUDA must not have been used before in this process.
    """
    if not world.me.gpus:
        return None
    visible, index = seen_by(world)
    if visible is not None:
        os.environ[_VISIBLE] = visible
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def seen_by(world: World) -> tuple[str | None, int]:
    """The GPUs of a rank's node, as CUDA is told them, and the number of its own first among them.

    One that several workers share is there once. None, if nobody has assigned any: then all see
    all of the machine's.
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
