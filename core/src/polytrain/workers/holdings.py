"""What an agent holds of the data for its trainers: descriptors of memory that they map."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from polytrain.data.assignment import RunDataset, holding
from polytrain.data.shared_memory import (
    Extent,
    bytes_to_shared_memory,
    parts_to_shared_memory,
    to_buffer,
)
from polytrain.data.spec import Held, ShardSpec
from polytrain.data.stream import StreamSpec
from polytrain.workers.pickling import pickled_apart, pickled_with, unpickled


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """What one agent has to know and to hold of all data sets."""

    specs: bytes
    """Pickled for trainers; an agent has no need to know."""

    holdings: bytes
    """Pickled: for each data set of which an agent holds something, a `Holding`, or None where the
    rows come out of the object store."""

    references: list[Any]
    """To objects of Ray's that the holdings are about: Ray has to know who has them."""

    tables: tuple[Any, ...]
    """References to these, in the same order, each in a list so that it isn't fetched before."""

    def is_like(self, other: DataOrder) -> bool:
        """Whether both ask for the same rows of the same data sets, in one run."""
        return (self.specs, self.holdings) == (other.specs, other.holdings)


class DataOffice:
    """Makes the orders of a run's agents, in the driver."""

    def __init__(
        self, datasets: Sequence[RunDataset], specs: Sequence[ShardSpec | StreamSpec]
    ) -> None:
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
            [ray.put(np.frombuffer(to_buffer(_whole(dataset, spec)), dtype=np.uint8))]
            for dataset, spec in self._held
            if spec.held is Held.ALL
        )

    def order(self, world_size: int, rank: int) -> DataOrder | None:
        """What the agent of a rank is to hold; None without any data."""
        if not self._has_data:
            return None
        holdings = tuple(
            None if spec.held is Held.ALL else holding(dataset, spec, world_size, rank)
            for dataset, spec in self._held
        )
        pickled, references = pickled_apart(*self._user_code, value=holdings, kind=ray.ObjectRef)
        return DataOrder(
            specs=self._pickled_specs,
            holdings=pickled,
            references=references,
            tables=self._tables,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What an agent holds."""

    descriptors: tuple[int, ...]
    """Of the pickled specs, then of each data set's table."""

    extents: tuple[Extent | None, ...]
    """Where in the memory behind them the tables lie; None for all of it."""

    kept: tuple[Any, ...]
    """An object stays in the object store for as long as somebody has what Ray gave for it."""

    order: DataOrder
    """What they were held for."""

    def release(self) -> None:
        """Give the memory back, as far as no trainer maps it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def hold(order: DataOrder, before: Holdings | None) -> Holdings:
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
    for wanted in unpickled(order.holdings, order.references):
        if wanted is None:
            [reference] = next(tables)
            array = ray.get(reference)
            descriptor, extent = _store_memory(array) or (
                bytes_to_shared_memory(memoryview(array)),
                None,
            )
            kept.append(array)
        else:
            descriptor, extent = (
                parts_to_shared_memory(wanted.parts(), wanted.schema, len(wanted.rows)),
                None,
            )
        descriptors.append(descriptor)
        extents.append(extent)
    return Holdings(
        descriptors=tuple(descriptors), extents=tuple(extents), kept=tuple(kept), order=order
    )


def _whole(dataset: RunDataset, spec: ShardSpec) -> pa.Table:
    return holding(dataset, spec, 1, 0).read()


def _store_memory(array: np.ndarray[Any, Any]) -> tuple[int, Extent] | None:
    """The object store's memory that lies behind an array; None if it can't be told.

    The store is one file without a name, mapped by this process. The process that serves it, which
    has started this one, holds the file open, and whoever may look at that process can open it too.
    """
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, device, inode, *_ = line.split()
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address and address + array.nbytes <= stop:
                break
        else:
            return None
    major, minor = (int(part, 16) for part in device.split(":"))
    file = (os.makedev(major, minor), int(inode))
    server = f"/proc/{os.getppid()}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(server):
            if _identity(f"{server}/{name}") == file:
                descriptor = os.open(f"{server}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                where = Extent(offset=int(offset, 16) + address - start, size=array.nbytes)
                return descriptor, where
    return None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # closed in the meantime
        return None
    return status.st_dev, status.st_ino
