"""Where rank 0 serves torch's store."""

from __future__ import annotations

import gc

import pytest
from tests.listeners import listeners

from polytrain_plugins import Member
from polytrain_torch.backend import Torch
from polytrain_torch.engine import TorchEngine


@pytest.mark.parametrize(("nodes", "address"), [(1, "127.0.0.1"), (2, "127.0.0.2")])
def test_the_store_listens_at_the_offered_address_only(nodes: int, address: str) -> None:
    rank_0 = Member(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2 // nodes,
        node_rank=0,
        node_count=nodes,
        host="127.0.0.2",
        cpus=1,
        gpus=0,
    )
    # Stores of other tests listen until they are collected.
    gc.collect()
    engine, before = TorchEngine(Torch()), listeners()
    with engine.offering(rank_0) as offer:
        assert offer.host == address
        assert sorted(listeners()) == sorted([*before, address])
    engine.close()
    gc.collect()
    assert listeners() == before
