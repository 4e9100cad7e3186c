"""What an agent holds of the data for its worker processes: descriptors of memory that they map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from polytrain.data.shards.assignment import RunDataset, holding
from polytrain.data.shards.shared_memory import (
    Extent,
    bytes_to_shared_memory,
    parts_to_shared_memory,
    to_buffer,
)
from polytrain.data.shards.spec import Held, ShardSpec
from polytrain.data.streams.stream import StreamSpec
from polytrain.workers.pickling import pickled_apart, pickled_with, unpickled


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTable:
    """A table that an agent has mapped."""

    descriptor: int
    extent: Extent | None
    """Where in the memory behind the descriptor it lies; None for all of it."""

    kept: Any
    """What has to exist for as long as the table is used."""


class SharedTable(Protocol):
    """A table that every agent reads whole, however many there are."""

    def open(self) -> OpenTable:
        """Map it in an agent."""

    def close(self) -> None:
        """Give it back, in the driver."""


class TableStore(Protocol):
    """Where the driver puts what all agents read."""

    @property
    def reference_type(self) -> type | tuple[type, ...]:
        """Of what a data set may hold, and what has to travel in a way of its own."""

    def share(self, table: pa.Buffer) -> SharedTable:
        """Put a table where all agents can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """What one agent has to know and to hold of all data sets."""

    specs: bytes
    """Pickled for worker processes; an agent has no need to know."""

    shard_cache: bytes
    """Pickled: for each data set of which an agent holds something, a `Holding`, or None where it
    is a table that all share."""

    references: list[Any]
    """To objects of Ray's that the holdings are about: Ray has to know who has them."""

    tables: tuple[SharedTable, ...]
    """These, in the same order."""

    def is_like(self, other: CacheRequest) -> bool:
        """Whether both ask for the same rows of the same data sets, in one run."""
        return (self.specs, self.shard_cache) == (other.specs, other.shard_cache)


class ShardCachePlanner:
    """Makes the orders of a run's agents, in the driver."""

    def __init__(
        self,
        datasets: Sequence[RunDataset],
        specs: Sequence[ShardSpec | StreamSpec],
        store: TableStore,
    ) -> None:
        self._store = store
        self._has_data = bool(datasets)
        self._user_code = [code for dataset in datasets for code in dataset.user_code]
        self._pickled_specs = pickled_with(*self._user_code, value=tuple(specs))
        self._held = [
            (dataset, spec)
            for dataset, spec in zip(datasets, specs, strict=True)
            if isinstance(spec, ShardSpec) and spec.held is not Held.NOTHING
        ]
        # Put there once, however many agents read it.
        self._tables = tuple(
            store.share(to_buffer(_whole(dataset, spec)))
            for dataset, spec in self._held
            if spec.held is Held.ALL
        )

    def order(self, world_size: int, rank: int) -> CacheRequest | None:
        """What the agent of a rank is to hold; None without any data."""
        if not self._has_data:
            return None
        shard_cache = tuple(
            None if spec.held is Held.ALL else holding(dataset, spec, world_size, rank)
            for dataset, spec in self._held
        )
        kind = self._store.reference_type
        pickled, references = pickled_apart(*self._user_code, value=shard_cache, kind=kind)
        return CacheRequest(
            specs=self._pickled_specs,
            shard_cache=pickled,
            references=references,
            tables=self._tables,
        )

    def close(self) -> None:
        """Give back what all agents shared."""
        for table in self._tables:
            table.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCache:
    """What an agent holds."""

    descriptors: tuple[int, ...]
    """Of the pickled specs, then of each data set's table."""

    extents: tuple[Extent | None, ...]
    """Where in the memory behind them the tables lie; None for all of it."""

    kept: tuple[Any, ...]
    """An object stays in the object store for as long as somebody has what Ray gave for it."""

    order: CacheRequest
    """What they were held for."""

    def release(self) -> None:
        """Give the memory back, as far as no worker process maps it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def hold(order: CacheRequest, before: ShardCache | None) -> ShardCache:
    """Carry an order out, in an agent.

    Args:
        order: what to hold from now on.
        before: what was held until now; it is released, unless it is the same.
    """
    if before is not None:
        if before.order.is_like(order):
            return before
        before.release()
    descriptors, kept = [bytes_to_shared_memory(order.specs)], []
    extents: list[Extent | None] = []
    tables = iter(order.tables)
    for wanted in unpickled(order.shard_cache, order.references):
        if wanted is None:
            opened = next(tables).open()
            descriptor, extent = opened.descriptor, opened.extent
            kept.append(opened.kept)
        else:
            descriptor, extent = (
                parts_to_shared_memory(wanted.parts(), wanted.schema, len(wanted.rows)),
                None,
            )
        descriptors.append(descriptor)
        extents.append(extent)
    return ShardCache(
        descriptors=tuple(descriptors), extents=tuple(extents), kept=tuple(kept), order=order
    )


def _whole(dataset: RunDataset, spec: ShardSpec) -> pa.Table:
    return holding(dataset, spec, 1, 0).read()
