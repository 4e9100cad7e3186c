"""Loaders that aren't split: each rank has its own, and rank 0 alone may have one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch_runs import fit
from tests.sweeps import only_in_sweep

from polytrain import RunConfig

ROWS = 12


def validates_on_rank_0(config: dict[str, Any]) -> None:
    """Trains on unsplit loaders, evaluates on rank 0 alone, and fails once in mid-epoch."""
    import json

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

    import polytrain
    from polytrain_torch import TrainingState, prepare_data_loader, seed_everything

    class Shuffled(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(rank, ROWS, 2))

    rank, attempt = dist.get_rank(), polytrain.get_context().get_attempt()
    if config["seed"] == "by rank":
        torch.manual_seed(7 + rank)
    elif config["seed"] == "everything":
        seed_everything(7)
    state = TrainingState()
    done = state.restore()
    loaders = {}
    rows: dict[str, list[list[int]]] = {"train": [[], []], "valid": [], "stream": [], "part": []}
    if rank == 0:
        valid = prepare_data_loader(DataLoader(range(5)), add_dist_sampler=False)
        part = DistributedSampler(range(ROWS), shuffle=False)
        loaders["part"] = DataLoader(range(ROWS), sampler=part)
        loaders["stream"] = DataLoader(Shuffled())
        for name, loader in loaders.items():
            loaders[name] = prepare_data_loader(loader, add_dist_sampler=False)
    train = prepare_data_loader(
        DataLoader(range(ROWS), batch_size=2, shuffle=True), add_dist_sampler=False
    )
    for epoch in range(done.get("epoch", 0), 2):
        for number, batch in enumerate(train):
            rows["train"][epoch] += batch.tolist()
            state.report({}, epoch=epoch)
            if epoch == 1 and number == 1 and not done:
                polytrain.get_checkpoint()  # It waits for the commit
                Path(config["output"], f"{rank}-{attempt}.json").write_text(json.dumps(rows))
                dist.barrier()
                raise OSError("once")
        if rank == 0:
            rows["valid"].append([int(row) for row in valid])
            for name, loader in loaders.items():
                rows[name].append([int(row) for row in loader])
    Path(config["output"], f"{rank}-{attempt}.json").write_text(json.dumps(rows))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [only_in_sweep("none"), "everything", "by rank"])
def test_each_rank_has_its_own_rows_and_places(quiet: RunConfig, tmp_path: Path, seed: str) -> None:
    config = {"output": str(tmp_path), "seed": seed}
    assert fit(quiet, validates_on_rank_0, config).restarts == 1
    (before, after), (other, others_rest) = (
        [json.loads((tmp_path / f"{rank}-{attempt}.json").read_text()) for attempt in range(2)]
        for rank in range(2)
    )
    for first, rest in ((before, after), (other, others_rest)):
        assert len(first["train"][1]) == 4
        whole = first["train"][1] + rest["train"][1]
        assert sorted(first["train"][0]) == sorted(whole) == [*range(ROWS)]
        assert first["train"][0] != whole
    assert (before["train"] == other["train"]) is (seed != "by rank")
    assert before["valid"] + after["valid"] == [[*range(5)]] * 2
    assert before["part"] + after["part"] == [[*range(0, ROWS, 2)]] * 2
    assert before["stream"] + after["stream"] == [[*range(0, ROWS, 2)]] * 2
