"""The engine of a script: it checks that all ranks connect, then lets the script make its group.

The store stays open for the attempt. Rank 0's process serves it, as the agent of `torchrun` does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from polytrain import heartbeat
from polytrain_plugins import World, changed_environment
from polytrain_torch.collectives.node_group import forget_group
from polytrain_torch.devices import show_gpus
from polytrain_torch.engine import TorchEngine, variables
from polytrain_torch.libraries import give_rank
from polytrain_torch.private import process_groups
from polytrain_torch.randomness import share_seed


class ScriptEngine(TorchEngine):
    """One rank of a script that makes its own process group."""

    uses_depot = False

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        show_gpus(world)
        store = self.store(world)
        with changed_environment(variables(world)):
            give_rank(world.me)
            dist.init_process_group(
                # Not NCCL: no GPU may be used before the script chooses one.
                backend="gloo",
                # The script's own group uses the same store, without this prefix.
                store=dist.PrefixStore("polytrain", store),
                rank=world.me.rank,
                world_size=world.size,
                timeout=self.timeout,
            )
            share_seed(store)
            # A script needn't report anything, so count optimizer steps as progress.
            steps = register_optimizer_step_post_hook(_show_progress)
            try:
                with _destroyed_groups_kept():
                    yield
            finally:
                steps.remove()
                if dist.is_initialized():
                    dist.destroy_process_group()
                forget_group()
                self.close()

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        sums = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(sums)
        # The group isn't used again: the script's `init_process_group` makes the next one.
        dist.destroy_process_group()
        return [int(number) for number in sums.tolist()]


@torch.compiler.disable
def _show_progress(*_: object) -> None:
    heartbeat()


_kept: list[Any] = []
"""Process groups that the script has destroyed, kept until the process ends."""


@contextmanager
def _destroyed_groups_kept() -> Iterator[None]:
    """Keep the objects of process groups that the script destroys: its DDP models may need them.

    A DDP model that is released after its group would run the gloo group's destructor with the GIL
    held. That joins a thread which may need the GIL to release objects of a backward pass: a
    deadlock.
    """
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def keep_and_destroy(group: Any = None) -> None:
        world = process_groups()
        _kept.extend(world.pg_map)
        number = world.group_count
        destroy(group)
        # torch restarts its count at 0: the next group would find this one's keys in the store.
        world.group_count = number

    modules: tuple[Any, ...] = (dist, distributed_c10d)
    for module in modules:
        module.destroy_process_group = keep_and_destroy
    try:
        yield
    finally:
        for module in modules:
            module.destroy_process_group = destroy
