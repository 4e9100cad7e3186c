"""Holds an agent's data for its worker processes, in memory that they map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.shared_memory import Extent, parts_to_shared_memory, to_buffer
from polytrain.data.shards.spec import DatasetSpec, Held, ShardSpec
from polytrain.functions.pickling import pickled_apart, pickled_with, unpickled
from polytrain.workers.agents.calls import OpenedBytes, SharedBytes, SharedStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """The specs and rows of all data sets that one agent needs."""

    specs: SharedBytes
    """Pickled for worker processes; the agent doesn't read them."""

    shard_cache: bytes
    """Pickled: for each data set that an agent holds, its `HeldRows`, or None for a table that all
    agents share."""

    references: list[Any]
    """References to Ray objects in `shard_cache`, sent separately so that Ray counts them."""

    tables: tuple[SharedBytes, ...]
    """The tables that all agents share, in the order of the data sets."""


class ShardCachePlanner:
    """Makes the cache requests for a run's agents, in the driver."""

    def __init__(
        self,
        datasets: Sequence[RunDataset],
        specs: Sequence[DatasetSpec],
        store: SharedStore,
    ) -> None:
        self._store = store
        self._user_code = [code for dataset in datasets for code in dataset.user_code]
        self._held = [
            (dataset, spec)
            for dataset, spec in zip(datasets, specs, strict=True)
            if isinstance(spec, ShardSpec) and spec.held is not Held.NOTHING
        ]
        # Share the specs once for all agents: they may contain a map-style data set.
        pickled = pickled_with(*self._user_code, value=tuple(specs))
        self._specs = store.share(pa.py_buffer(pickled))
        self._tables = tuple(
            store.share(to_buffer(dataset.held_rows(spec, 1, 0).read()))
            for dataset, spec in self._held
            if spec.held is Held.ALL
        )

    def request(self, world_size: int, rank: int) -> CacheRequest:
        """Return the request for the agent of a rank."""
        shard_cache = tuple(
            None if spec.held is Held.ALL else dataset.held_rows(spec, world_size, rank)
            for dataset, spec in self._held
        )
        kind = self._store.reference_type
        pickled, references = pickled_apart(*self._user_code, value=shard_cache, kind=kind)
        return CacheRequest(
            specs=self._specs,
            shard_cache=pickled,
            references=references,
            tables=self._tables,
        )

    @property
    def shared(self) -> tuple[SharedBytes, ...]:
        """What the agents of all ranks need."""
        return (self._specs, *self._tables)

    def close(self) -> None:
        """Free the shared memory."""
        for shared in self.shared:
            shared.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCache:
    """The data that an agent holds."""

    opened: tuple[OpenedBytes, ...]
    """The memory of the pickled specs, then of each data set's table."""

    request: CacheRequest
    """The request for these data."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the memory."""
        return tuple(each.descriptor for each in self.opened)

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """The extents in the descriptors' memory, in the same order; None for all of it."""
        return tuple(each.extent for each in self.opened)

    def release(self) -> None:
        """Free the memory, except where worker processes still map it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def hold(request: CacheRequest, before: ShardCache | None) -> ShardCache:
    """Read the requested rows, in an agent.

    Args:
        before: the previous cache; it is released, unless it holds the same rows.
    """
    if before is not None:
        if before.request.shard_cache == request.shard_cache:
            return before
        before.release()
    opened = [request.specs.open()]
    tables = iter(request.tables)
    for held in unpickled(request.shard_cache, request.references):
        if held is None:
            opened.append(next(tables).open())
        else:
            rows = parts_to_shared_memory(held.parts(), held.schema, len(held.rows))
            opened.append(OpenedBytes(descriptor=rows))
    return ShardCache(opened=tuple(opened), request=request)
