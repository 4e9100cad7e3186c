"""Tensor parallelism and FSDP2 on one mesh: saved on one, resumed on others, killed in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from polytrain import Checkpoint, CheckpointConfig, Result, RunConfig

ROWS, STEPS = 32, 4

Mesh = tuple[int, int]
"""Numbers of ranks for data and for tensors."""


def train(config: dict[str, Any]) -> None:
    """Train an epoch in batches of 8 rows, unless that is done, and report the state."""
    import os
    import signal

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader

    mesh = init_device_mesh("cpu", tuple(config["mesh"]), mesh_dim_names=("data", "tensors"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensors"], plan)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x = torch.arange(4.0 * ROWS).reshape(ROWS, 4) / ROWS
    data = TensorDataset(torch.arange(ROWS), x)
    # Ranks that share tensors need the same rows.
    sampler = DistributedSampler(data, mesh["data"].size(), mesh["data"].get_local_rank())
    batches = DataLoader(data, batch_size=8 // mesh["data"].size(), sampler=sampler)
    loader = prepare_data_loader(batches)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and context.get_world_rank() == 3
    step = done.get("step", 0)
    for rows, inputs in loader if step < STEPS else ():
        step += 1
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with Path(config["rows"], str(context.get_world_rank())).open("a") as file:
            file.write(f"{json.dumps([step, rows.tolist()])}\n")
        if dies and step == config["dies_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2:
            state.report({"loss": loss.item()}, step=step)
        else:
            polytrain.report({"loss": loss.item()})
    # Between two epochs, where another mesh can divide the rows differently.
    state.report({}, step=step)


def fit(
    directory: Path,
    mesh: Mesh,
    written_by: Literal["rank_0", "every_rank"],
    *,
    dies_at: int = -1,
    restore_from: Checkpoint | None = None,
) -> Result:
    rows = directory / "rows"
    rows.mkdir(parents=True)
    return torch_runs.fit(
        RunConfig(storage_path=directory / "runs", progress=False),
        train,
        {"mesh": mesh, "rows": str(rows), "dies_at": dies_at},
        workers=mesh[0] * mesh[1],
        restore_from=restore_from,
        checkpoint_config=CheckpointConfig(written_by=written_by),
    )


def rows_by_rank(directory: Path) -> list[dict[int, list[int]]]:
    """The rows of each rank's steps, by rank; of a repeated step, those of the last time."""
    files = sorted(Path(directory, "rows").iterdir())
    return [dict(map(json.loads, file.read_text().splitlines())) for file in files]


def states_of(result: Result) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that rank 0 has written, by what they belong to."""
    assert result.checkpoint is not None
    file = Path(result.checkpoint.path, "state.pt")
    optimizer = torch.load(file, weights_only=True)["parts"]["optimizer"]
    return flat({"model": result.load_model(), "optimizer": optimizer["state"]})


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for name, each in state.items():
        here = prefix + name
        found |= flat(each, f"{here}/") if isinstance(each, Mapping) else {here: each}
    return found


def sharded_states_of(result: Result, file: Path) -> dict[str, torch.Tensor]:
    """The same of a checkpoint of all ranks, put together by torch."""
    assert result.checkpoint is not None
    dcp_to_torch_save(result.checkpoint.path, file)
    whole = torch.load(file, weights_only=True)
    return flat({"model": whole["model"], "optimizer": whole["optimizer"]["state"]})


@dataclass(frozen=True, kw_only=True)
class Trained:
    directory: Path
    result: Result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two ranks for data by two for tensors."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return Trained(directory=directory, result=fit(directory, (2, 2), "every_rank"))


def test_ranks_that_share_tensors_have_the_same_rows(undisturbed: Trained) -> None:
    first, second, third, fourth = rows_by_rank(undisturbed.directory)
    assert first == second
    assert third == fourth
    assert sorted(chain(*first.values(), *third.values())) == [*range(ROWS)]


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [(1, 2), only_in_sweep((4, 1))], ids=str)
def test_another_mesh_loads_all_states(tmp_path: Path, undisturbed: Trained, mesh: Mesh) -> None:
    before = undisturbed.result
    after = fit(tmp_path, mesh, "rank_0", restore_from=before.checkpoint)
    assert equal(states_of(after), sharded_states_of(before, tmp_path / "whole.pt"))


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [only_in_sweep((1, 2)), only_in_sweep((4, 1))], ids=str)
def test_another_mesh_loads_states_that_rank_0_wrote(tmp_path: Path, mesh: Mesh) -> None:
    before = fit(tmp_path / "before", (2, 2), "rank_0")
    after = fit(tmp_path / "after", mesh, "every_rank", restore_from=before.checkpoint)
    assert equal(sharded_states_of(after, tmp_path / "whole.pt"), states_of(before))


@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_a_killed_run_on_a_mesh_ends_in_the_same_states(
    tmp_path: Path, undisturbed: Trained
) -> None:
    killed = fit(tmp_path, (2, 2), "every_rank", dies_at=3)
    assert killed.restarts == 1
    assert killed.history == undisturbed.result.history
    assert rows_by_rank(tmp_path) == rows_by_rank(undisturbed.directory)
    ours, theirs = (
        sharded_states_of(result, tmp_path / f"{name}.pt")
        for name, result in (("killed", killed), ("undisturbed", undisturbed.result))
    )
    assert equal(ours, theirs)
