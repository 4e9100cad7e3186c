"""Layers that FSDP gathers one by one, on two ranks that begin with different weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from polytrain.testing.local_world import run_world
from polytrain_torch import Torch, prepare_model
from polytrain_torch.checkpoints.sharded_parts import with_state


def shards(config: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard

    import polytrain
    from polytrain_torch.collectives.gathering import gathered

    def model() -> torch.nn.Sequential:
        torch.manual_seed(dist.get_rank())
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    own = model()
    of_rank_0 = gathered([each.detach().clone() for each in own.parameters()])[0]
    if config["shards_before"]:
        for layer in own:
            fully_shard(layer)
    layers = () if config["shards_before"] else own
    sharded = prepare_model(own, parallel_strategy="fsdp", sharded_layers=layers)
    whole = [each.full_tensor() for each in sharded.parameters()]
    polytrain.report(
        {
            "are_of_rank_0": all(torch.equal(*each) for each in zip(whole, of_rank_0, strict=True)),
            "are_layers_sharded": all(isinstance(each, FSDPModule) for each in own),
        }
    )


def run(tmp_path: Path, *, shards_before: bool) -> list[dict[str, Any]]:
    world = run_world(
        Torch(timeout_s=60),
        data=pa.table({"x": [0.0] * 4}),
        path=tmp_path,
        training_function=shards,
        training_config={"shards_before": shards_before},
    )
    assert [rank.failure for rank in world.ranks] == [None, None]
    return [dict(rank.reports[-1].metrics) for rank in world.ranks]


def test_layers_get_rank_0s_weights(tmp_path: Path) -> None:
    expected = {"are_of_rank_0": True, "are_layers_sharded": True}
    assert run(tmp_path, shards_before=False) == [expected] * 2


def test_that_layers_sharded_before_do_not_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = {"are_of_rank_0": False, "are_layers_sharded": True}
    assert run(tmp_path, shards_before=True) == [expected] * 2
    assert "sharded_layers=model.layers" in capfd.readouterr().err


def replicates(config: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import polytrain
    from polytrain_torch.collectives.gathering import gathered

    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    of_rank_0 = gathered([each.detach().clone() for each in model.parameters()])[0]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    arguments = {"mesh": mesh}
    prepare_model(model, parallel_strategy="fsdp", parallel_strategy_kwargs=arguments)
    mine = [each.to_local() for each in model.parameters()]
    are_of_rank_0 = all(torch.equal(*each) for each in zip(mine, of_rank_0, strict=True))
    polytrain.report({"are_of_rank_0": are_of_rank_0})


def test_replicas_of_layers_that_were_sharded_before_are_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = run_world(
        Torch(timeout_s=60),
        data=pa.table({"x": [0.0] * 4}),
        path=tmp_path,
        training_function=replicates,
        training_config={},
    )
    assert [rank.failure for rank in world.ranks] == [None, None]
    assert [rank.reports[-1].metrics["are_of_rank_0"] for rank in world.ranks] == [True, True]
    assert "sharded before" not in capfd.readouterr().err


def test_layers_are_sharded_by_fsdp_only() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"sharded_layers: parallel_strategy='ddp'"):
        prepare_model(model, sharded_layers=model)


def test_the_parameters_with_a_state_are_those_of_one_optimizer() -> None:
    saved = ["adam.state.a.w.step", "adam.state.b.w.inner.step", "adam.param_groups.a.w2.lr"]
    found = with_state("adam", [*saved, "other.state.c.w.step", "model.d.w"])
    assert {each for each in found if each.endswith("w")} == {"a.w", "b.w"}
    assert not with_state("ada", saved)
