"""What a run's agents get of its data: how often, and in which memory."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from polytrain.data.read.describe import describe
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.shared_memory import from_shared_memory, mapped
from polytrain.workers.agents.shard_cache import ShardCachePlanner, hold
from polytrain.workers.driver.local_cluster import LocalCluster

WORKERS = 8
LARGE = 4 << 20


class Items:
    """A map-style data set that counts how often it is pickled."""

    pickled = 0

    def __init__(self) -> None:
        self.values = np.arange(LARGE // 8)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return int(self.values[index])

    def __getstate__(self) -> dict[str, Any]:
        Items.pickled += 1
        return self.__dict__


def planner_of(data: Any) -> ShardCachePlanner:
    dataset = RunDataset(source=describe("train", data))
    spec = dataset.spec(world_size=WORKERS, whole=False, as_tables=False, only_tables=False)
    return ShardCachePlanner([dataset], [spec], LocalCluster())


def requested(planner: ShardCachePlanner, rank: int) -> Any:
    return planner.request(WORKERS, rank)


def test_a_map_style_data_set_is_in_the_memory_of_a_node_once() -> None:
    Items.pickled = 0
    planner = planner_of(Items())
    requests = [requested(planner, rank) for rank in range(WORKERS)]
    assert Items.pickled == 1
    assert all(len(pickle.dumps(request)) < 2000 for request in requests), "what each agent is sent"
    caches = [hold(request, None) for request in requests]
    try:
        assert Items.pickled == 1
        files = {os.fstat(cache.descriptors[0]).st_ino for cache in caches}
        assert len(files) == 1, "all agents map the same memory"
        for cache in caches:
            [spec] = pickle.loads(mapped(cache.descriptors[0], cache.extents[0]))
            [piece] = spec.pieces
            assert piece.read(WORKERS, WORKERS + 1)["0"].to_pylist() == [WORKERS]
    finally:
        for cache in caches:
            cache.release()
        planner.close()


def test_a_table_is_in_the_memory_of_a_node_once() -> None:
    planner = planner_of(pa.table({"x": np.arange(LARGE // 8)}))
    requests = [requested(planner, rank) for rank in range(WORKERS)]
    assert all(len(pickle.dumps(request)) < 2000 for request in requests)
    caches = [hold(request, None) for request in requests]
    try:
        assert len({os.fstat(cache.descriptors[1]).st_ino for cache in caches}) == 1
        tables = [from_shared_memory(cache.descriptors[1], cache.extents[1]) for cache in caches]
        assert {table.num_rows for table in tables} == {LARGE // 8}
    finally:
        for cache in caches:
            cache.release()
        planner.close()


@pytest.mark.parametrize("data", [Items(), pa.table({"x": [1, 2, 3, 4, 5, 6, 7, 8]})])
def test_an_agent_that_stays_keeps_what_it_holds(data: Any) -> None:
    planner = planner_of(data)
    first = hold(requested(planner, 3), None)
    try:
        assert hold(requested(planner, 3), first) is first
    finally:
        first.release()
        planner.close()
