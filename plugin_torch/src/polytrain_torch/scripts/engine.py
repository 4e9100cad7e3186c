"""The engine of a script: it proves that all ranks are there, and leaves the group to the script.

The store of the attempt stays. Under `torchrun` the agent serves it; here rank 0's process does.
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
from polytrain_torch.private import process_groups
from polytrain_torch.randomness import share_seed


class ScriptEngine(TorchEngine):
    """One rank of a script, which makes its own process group."""

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        show_gpus(world)
        store = self.store(world)
        with changed_environment(variables(world)):
            dist.init_process_group(
                # The script may not have used a GPU yet when it chooses one.
                backend="gloo",
                # The script's own group has keys in the same store.
                store=dist.PrefixStore("polytrain", store),
                rank=world.me.rank,
                world_size=world.size,
                timeout=self.timeout,
            )
            share_seed(store)
            # A script needn't report anything: a step of an optimizer is progress too.
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
        # This was the only use of the group: `init_process_group` of the script makes the next.
        dist.destroy_process_group()
        return [int(number) for number in sums.tolist()]


def _show_progress(*_: object) -> None:
    heartbeat()


_kept: list[Any] = []
"""Process groups that the script has destroyed."""


@contextmanager
def _destroyed_groups_kept() -> Iterator[None]:
    """Keep the objects of process groups that the script destroys, while it has DDP models of them.

    Otherwise a DDP model that is released after its group would run the destructor of gloo's group
    with Python's lock held. It joins a thread that may need the lock to release what a backward
    pass has left, and waits for ever.
    """
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def keep_and_destroy(group: Any = None) -> None:
        world = process_groups()
        _kept.extend(world.pg_map)
        number = world.group_count
        destroy(group)
        # torch counts from 0 again: the next group would find this one's addresses in the store.
        world.group_count = number

    modules: tuple[Any, ...] = (dist, distributed_c10d)
    for module in modules:
        module.destroy_process_group = keep_and_destroy
    try:
        yield
    finally:
        for module in modules:
            module.destroy_process_group = destroy
