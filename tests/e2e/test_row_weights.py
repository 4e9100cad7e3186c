"""Any number of rows, on any number of workers, trains what one process of plain torch trains."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.row_weight_cases import ACCUMULATED, DOORS, Case, alone, rows_of, train
from tests.e2e.torch_runs import DEEPSPEED, KERAS_ON_TORCH, TorchWith
from tests.sweeps import only_in_sweep

from polytrain import RunConfig, ScalingConfig, Trainer, make_trainer

pytestmark = pytest.mark.sweep

SHORT: list[Case] = [(14, 2), (13, 2), (1000, 32), (5, 1), (2, 3), (9, 3)]
"""Full batches alone, and last ones of less than a row for each worker."""

SIZES = (1, 2, 3, 8)
TABLE: list[Case] = [(rows, size) for rows in range(1, 201) for size in SIZES]
LIBRARIES: list[Case] = [(rows, size) for rows in range(1, 41) for size in (1, 2, 3)]
"""What takes a tenth of a second for each."""

LIBRARIES_OF_DOORS = (
    *(KERAS_ON_TORCH, DEEPSPEED, "lightning"),
    *(f"polytrain_torch.{name}" for name in ("accelerate", "lightning", "transformers")),
)
"""Imported once, for the workers of all doors."""

SLOW = ("Lightning", "Transformers", "Accelerate", "FSDP2", "Keras", "processes", "compile")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("workers", [only_in_sweep(1), 2, only_in_sweep(3), only_in_sweep(4)])
def test_every_door_ends_where_one_process_ends(
    quiet: RunConfig, request: pytest.FixtureRequest, door: str, workers: int
) -> None:
    table = LIBRARIES if any(name in door for name in SLOW) else TABLE
    cases = table if request.config.getoption("--sweep") else SHORT
    # A worker without any row has an empty batch, of which Keras on torch has no loss.
    cases = [case for case in cases if "Keras" not in door or case[0] >= workers]
    trained = weights_by(quiet, door, cases, workers)
    accumulated = ACCUMULATED if door == "accumulated gradients" else 1
    expected = [alone(case, workers, accumulated=accumulated) for case in cases]
    wrong = {
        case: (found, right)
        for case, found, right in zip(cases, trained, expected, strict=True)
        if found != pytest.approx(right, abs=2e-5)
    }
    assert not wrong


def weights_by(quiet: RunConfig, door: str, cases: list[Case], workers: int) -> Any:
    numbers = sorted({rows for rows, _ in cases})
    trainer = Trainer(
        TorchWith(libraries=LIBRARIES_OF_DOORS),
        train,
        train_loop_config={"door": door, "cases": cases},
        datasets={f"rows {number}": rows_of(number) for number in numbers},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=quiet,
    )
    return trainer.fit().metrics["weights"]


def validate(config: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch import prepare_data_loader

    rows = torch.arange(float(config["rows"]))
    loader = prepare_data_loader(DataLoader(TensorDataset(rows), batch_size=config["batch"]))
    shard = polytrain.get_dataset_shard("rows")
    with torch.inference_mode():
        mine = [[row.tolist() for (row,) in loader]]
    with torch.no_grad():
        batches = shard.iter_torch_batches(batch_size=config["batch"])
        mine.append([batch["x"].tolist() for batch in batches])
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    polytrain.report(
        {"loader": [each[0] for each in all_ranks], "shard": [b for _, b in all_ranks]}
    )


@pytest.mark.parametrize("rows", [9, only_in_sweep(8), only_in_sweep(10), only_in_sweep(11)])
def test_a_loop_that_trains_nothing_has_each_row_once(quiet: RunConfig, rows: int) -> None:
    """A rank without a row in the last batch would count one twice, or not take part in it."""
    result = make_trainer(
        "torch",
        validate,
        train_loop_config={"rows": rows, "batch": 2},
        datasets={"rows": {"x": [float(row) for row in range(rows)]}},
        scaling_config=ScalingConfig(num_workers=4),
        run_config=quiet,
    ).fit()
    for door in ("loader", "shard"):
        by_rank = result.metrics[door]
        assert sorted(row for rank in by_rank for batch in rank for row in batch) == list(
            range(rows)
        )
        assert len({len(batches) for batches in by_rank}) == 1
        assert all(batch for batches in by_rank for batch in batches)
