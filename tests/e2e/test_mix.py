"""A mix of data sets has one order, whoever is killed and however many workers continue."""

from __future__ import annotations

import dataclasses
import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    DataConfig,
    FailureConfig,
    Mix,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

EPOCHS, GLOBAL_BATCH, STEPS_PER_EPOCH = 2, 20, 10


def train(config: dict[str, Any]) -> None:
    import os
    import signal
    import tempfile

    import torch
    import torch.distributed as dist

    context = polytrain.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    checkpoint, step = polytrain.get_checkpoint(), 0
    if checkpoint is not None:
        step = int((Path(checkpoint.path) / "step").read_text())
    shard = polytrain.get_dataset_shard("train")
    name = f"{context.get_experiment_name()}-{attempt}-{rank}.jsonl"
    with (Path(config["diary"]) / name).open("w") as diary:
        while step < EPOCHS * STEPS_PER_EPOCH:
            for batch in shard.iter_batches(global_batch_size=GLOBAL_BATCH):
                step += 1
                line = {
                    "step": step,
                    "rank": rank,
                    "rows": batch["id"].reshape(len(batch["id"]), -1)[:, 0].tolist(),
                }
                print(json.dumps(line), file=diary, flush=True)
                dist.all_reduce(torch.ones(1))
                if config["kills"].get(attempt) == [rank, step]:
                    os.kill(os.getpid(), signal.SIGKILL)
                with tempfile.TemporaryDirectory() as directory:
                    (Path(directory) / "step").write_text(str(step))
                    polytrain.report(
                        {"step": step},
                        checkpoint=Checkpoint.from_directory(directory) if rank == 0 else None,
                    )


def steps_in(directory: Path) -> list[dict[int, list[int]]]:
    """The rows of each step, rank by rank, of each attempt."""
    attempts: dict[str, dict[int, dict[int, list[int]]]] = {}
    for path in sorted(directory.iterdir()):
        of_attempt = attempts.setdefault(path.stem.rpartition("-")[0], {})
        for line in map(json.loads, path.read_text().splitlines()):
            of_attempt.setdefault(line["step"], {})[line["rank"]] = line["rows"]
    return [
        {
            step: [row for _, rows in sorted(parts.items()) for row in rows]
            for step, parts in steps.items()
        }
        for steps in attempts.values()
    ]


def ragged(tokens: range) -> pa.Table:
    """Lists of one to seven tokens, four of which make a row."""
    sizes = [1 + number * 5 % 7 for number in range(len(tokens))]
    starts = [start for start in accumulate(sizes, initial=0) if start < len(tokens)]
    lists = [[*tokens[start:stop]] for start, stop in pairwise([*starts, len(tokens)])]
    return pa.table({"id": lists})


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [only_in_sweep("memory"), only_in_sweep("files"), "packed files"])
def test_a_mix_has_the_same_batches_after_kills_and_at_another_size(
    quiet: RunConfig, tmp_path: Path, kind: str
) -> None:
    pack = 4 if kind == "packed files" else None
    code, web = pa.table({"id": np.arange(50)}), pa.table({"id": np.arange(1000, 1900)})
    if pack is not None:
        code, web = ragged(range(200)), ragged(range(1000, 4600))
    sources: dict[str, Any] = {"code": code, "web": web}
    if kind != "memory":
        for name, table in sources.items():
            pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=30)
            sources[name] = tmp_path / f"{name}.parquet"
    diaries = {name: tmp_path / f"rows of {name}" for name in ("whole", "killed")}
    for diary in diaries.values():
        diary.mkdir()

    options = DataConfig(shuffle="window", window_rows=20, seed=3, pack=pack)

    def trainer(run: str, diary: str, workers: int, kills: Any, **arguments: Any) -> Any:
        return make_trainer(
            "torch",
            train,
            train_loop_config={"kills": kills, "diary": str(diaries[diary])},
            datasets={"train": Mix(sources, weights={"code": 0.3, "web": 0.7}, epoch=200)},
            dataset_config={"train": options},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=dataclasses.replace(
                quiet, name=run, failure_config=FailureConfig(max_failures=1)
            ),
            **arguments,
        )

    trainer("whole", "whole", 1, {}).fit()
    # The last comes without progress since the one before.
    kills = {0: [1, 4], 1: [0, 7], 2: [0, 7]}
    with pytest.raises(TrainingFailedError) as caught:
        trainer("first", "killed", 2, kills).fit()
    assert caught.value.result is not None
    start = caught.value.result.checkpoint
    trainer("second", "killed", 3, {0: [2, 13]}, restore_from=start).fit()

    [whole] = steps_in(diaries["whole"])
    attempts = steps_in(diaries["killed"])
    assert len(attempts) == 5
    assert {step for steps in attempts for step in steps} == whole.keys()
    for steps in attempts:
        for step, rows in steps.items():
            # A rank that others outlived may have begun no more than its part.
            assert rows == whole[step] or (step == max(steps) and {*rows} <= {*whole[step]})
    of_code = [row for rows in whole.values() for row in rows if row < 1000]
    assert len(of_code) == 120
    assert len({*of_code}) == 50
    assert {of_code.count(row) for row in of_code} == {2, 3}
