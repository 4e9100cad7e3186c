"""The engine: rank 0's coordination service, and the connection of all ranks to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.backend import clear_backends

from polytrain_jax.backend import Jax
from polytrain_plugins import Engine, Member, Offer, World, held_port

MODEL_FILE = "model.npz"

_HALF = 1 << 24
"""JAX computes with 32 bits by default."""


class JaxEngine(Engine[Mapping[str, Any]]):
    """One process of `jax.distributed`."""

    def __init__(self, options: Jax) -> None:
        self._options = options

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.rank != 0:
            yield Offer()
            return
        # The service binds the port while it is held, so no other process can take it.
        with held_port(me.ports, shared=True) as port:
            yield Offer(host=me.listen_host, port=port.number)

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        if world.size == 1:
            # It changes nothing in the process, so an inline run can be repeated.
            yield
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator_address=world.leader.address,
            # By default it listens on all interfaces. Rank 0 alone serves it.
            coordinator_bind_address=world.leader.address,
            num_processes=world.size,
            process_id=world.me.rank,
            initialization_timeout=self._options.timeout_s,
        )
        try:
            yield
        finally:
            jax.distributed.shutdown()
            # The backend owns the collectives' sockets, and lives as long as any compiled function.
            jax.clear_caches()
            clear_backends()
            gc.collect()

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        if world.size == 1:
            return list(values)
        halves = np.array([divmod(value, _HALF) for value in values], np.int32)
        everybodys = np.asarray(multihost_utils.process_allgather(halves), np.int64)
        return [int(high) * _HALF + int(low) for high, low in everybodys.sum(axis=0)]

    def save(self, model: Mapping[str, Any], directory: Path) -> None:
        arrays = {name: np.asarray(array) for name, array in model.items()}
        np.savez(directory / MODEL_FILE, **arrays)

    def load(self, directory: Path) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays in `model.npz`, by name."""
        with np.load(directory / MODEL_FILE) as arrays:
            return dict(arrays)


def weighted_mean(tree: Any, weight: float) -> Any:
    """See `polytrain_jax.mean_over_workers`."""
    if jax.process_count() == 1:
        return tree
    weights = np.asarray(multihost_utils.process_allgather(np.float32(weight)))
    everybodys = multihost_utils.process_allgather(tree)
    # The mean over a worker that has no row isn't a number.
    some = np.flatnonzero(weights)
    return jax.tree.map(
        lambda arrays: np.average(arrays[some], axis=0, weights=weights[some]), everybodys
    )
