"""FSDP2 on a mesh of replicas by shards: killed, continued from copies, loaded on other meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from polytrain import CheckpointConfig, Result, RunConfig

ROWS, EPOCHS = 96, 2
STEPS = ROWS // 32
"""Of an epoch, of four ranks with eight rows each."""


def train(config: dict[str, Any]) -> None:
    """Rank 3 is killed in a step, counted from 1, in the first attempt, at the third or later.

    It has the gradients then, for which all ranks have begun the step: they have copied the last.
    """
    import os
    import signal

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader, prepare_model, seed_everything

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(9, 4)
    )
    mesh = init_device_mesh("cpu", tuple(config["mesh"]), mesh_dim_names=("replicas", "shards"))
    if config["is_prepared"]:
        model = prepare_model(
            model,
            parallel_strategy="fsdp",
            parallel_strategy_kwargs={"mesh": mesh},
            sharded_layers=[model[0]],
        )
    else:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x = torch.arange(4.0 * ROWS).reshape(ROWS, 4) / ROWS
    rows = 32 // (mesh.size())
    loader = prepare_data_loader(DataLoader(TensorDataset(x), batch_size=rows, shuffle=True))
    seed_everything(7)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and context.get_world_rank() == 3

    class Steps:
        """Counts what this attempt does; nothing that trains reads it."""

        begun = 0

    for epoch in range(done.get("epoch", 0), EPOCHS):
        for (inputs,) in loader:
            Steps.begun += 1
            loss = (model(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if dies and Steps.begun == config["dies_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        state.report({"loss": loss.item()}, epoch=epoch + 1)
    if config["is_resumed"]:
        state.report({})


def fit(
    path: Path,
    *,
    mesh: tuple[int, int] = (2, 2),
    memory: int | None = None,
    written_by: Any = "every_rank",
    changes: Mapping[str, Any] | None = None,
    **config: Any,
) -> Result:
    return torch_runs.fit(
        RunConfig(storage_path=path, progress=False),
        train,
        {"mesh": mesh, "dies_at": -1, "is_prepared": False, "is_resumed": False, **config},
        workers=mesh[0] * mesh[1],
        checkpoint_config=CheckpointConfig(memory=memory, written_by=written_by),
        **(changes or {}),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Result]:
    """Return the run without a loss, by whether `prepare_model` has sharded the model."""

    @functools.cache
    def run(is_prepared: bool) -> Result:
        return fit(tmp_path_factory.mktemp("undisturbed"), is_prepared=is_prepared)

    return run


def states_of(result: Result, file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of all ranks, put together by torch."""
    assert result.checkpoint is not None
    dcp_to_torch_save(result.checkpoint.path, file)
    whole = torch.load(file, weights_only=True)
    optimizer = {
        f"{name} {key}": value
        for name, each in whole["optimizer"]["state"].items()
        for key, value in each.items()
    }
    return {**whole["model"], **optimizer}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dies_at", "memory", "is_prepared"),
    [
        (STEPS + 2, 1, False),
        only_in_sweep(STEPS + 2, None, False),
        only_in_sweep(3, 1, True),
        only_in_sweep(STEPS + 3, 2, True),
    ],
)
def test_a_killed_run_ends_in_the_same_bits(
    tmp_path: Path,
    undisturbed: Callable[[bool], Result],
    dies_at: int,
    memory: int | None,
    is_prepared: bool,
) -> None:
    killed = fit(tmp_path, dies_at=dies_at, memory=memory, is_prepared=is_prepared)
    whole = undisturbed(is_prepared)
    assert killed.restarts == 1
    if memory is not None:
        [asked] = journal(killed.path, "SurvivorsAsked")
        assert asked["reason"] == ""
    assert killed.history == whole.history
    assert equal(states_of(killed, tmp_path / "killed.pt"), states_of(whole, tmp_path / "whole.pt"))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mesh", [(1, 2), only_in_sweep((4, 1)), only_in_sweep((1, 4)), only_in_sweep((1, 1))], ids=str
)
def test_another_mesh_loads_all_states(
    tmp_path: Path, undisturbed: Callable[[bool], Result], mesh: tuple[int, int]
) -> None:
    whole = undisturbed(False)
    after = fit(tmp_path, mesh=mesh, is_resumed=True, changes={"restore_from": whole.checkpoint})
    assert equal(states_of(after, tmp_path / "after.pt"), states_of(whole, tmp_path / "whole.pt"))
