"""Every row is used exactly once per epoch, whoever is killed, however many workers go on.

Each rank writes down the rows of every step before it reports that step. What counts in the end is
what led to the final model: of each attempt, the steps up to the one that the next attempt began
with.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    DataConfig,
    FailureConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

ROWS, EPOCHS, GLOBAL_BATCH = 240, 3, 24
STEPS_PER_EPOCH = ROWS // GLOBAL_BATCH


class Diary:
    """What the ranks of all attempts have written down, in files of their own."""

    def __init__(self, directory: Path) -> None:
        self._attempts: dict[str, dict[int, list[int]]] = {}
        self._starts: dict[str, int] = {}
        for path in sorted(directory.iterdir()):
            attempt = path.name.partition("-")[0]
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            self._starts[attempt] = lines[0]["start"]
            for line in lines[1:]:
                steps = self._attempts.setdefault(attempt, {})
                steps.setdefault(line["step"], []).extend(line["rows"])

    @property
    def attempts(self) -> int:
        return len(self._starts)

    def steps_that_count(self) -> dict[int, list[int]]:
        """Step → its rows, of all ranks, in the attempt that the final model has it from."""
        counted: dict[int, list[int]] = {}
        for attempt in sorted(self._starts):
            start = self._starts[attempt]
            counted = {step: rows for step, rows in counted.items() if step <= start}
            counted |= {s: r for s, r in self._attempts.get(attempt, {}).items() if s > start}
        return counted


def train(config: Any) -> None:
    """Any backend's: all ranks together count how often each row was used; that is the model."""
    import os
    import signal
    import tempfile
    import time

    context = polytrain.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    add_up = config["add_up"]()
    counts, step = np.zeros(ROWS), 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state = json.loads((Path(checkpoint.path) / "state.json").read_text())
        counts, step = np.array(state["counts"]), state["step"]
    kill = config["kills"].get(attempt)
    name = f"{config['run']}{attempt}-{rank}.jsonl"
    with (Path(config["diary"]) / name).open("w") as diary:
        print(json.dumps({"start": step}), file=diary, flush=True)
        shard = polytrain.get_dataset_shard("train")
        while step < EPOCHS * STEPS_PER_EPOCH:
            for batch in shard.iter_batches(global_batch_size=GLOBAL_BATCH):
                step += 1
                rows = batch["id"]
                print(json.dumps({"step": step, "rows": rows.tolist()}), file=diary, flush=True)
                counts += add_up(np.bincount(rows, minlength=ROWS).astype(float))
                if kill == [rank, step]:
                    os.kill(os.getpid(), signal.SIGKILL)
                waits = rank == 0 and step in (
                    config.get("waits", {}).get(attempt),
                    # What there is more of may come one by one.
                    config.get("waits_in_size", {}).get(context.get_world_size()),
                )
                while waits and not polytrain.checkpoint_requested():
                    time.sleep(0.005)
                with tempfile.TemporaryDirectory() as directory:
                    state = {"counts": counts.tolist(), "step": step}
                    (Path(directory) / "state.json").write_text(json.dumps(state))
                    polytrain.report(
                        {"step": step},
                        checkpoint=Checkpoint.from_directory(directory) if rank == 0 else None,
                    )


def with_torch() -> Any:
    import torch
    import torch.distributed as dist

    def add_up(vector: Any) -> Any:
        tensor = torch.tensor(vector)
        dist.all_reduce(tensor)
        return tensor.numpy()

    return add_up


def with_xgboost() -> Any:
    from xgboost import collective

    return lambda vector: collective.allreduce(vector, collective.Op.SUM)


def with_tensorflow() -> Any:
    import tensorflow as tf

    import polytrain_tf

    strategy = polytrain_tf.strategy()

    def total(vector: Any) -> Any:
        # On the replica's device: what is on none can't be reduced.
        return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(vector))

    @tf.function
    def run(vector: Any) -> Any:
        return strategy.run(total, args=(vector,))

    def add_up(vector: Any) -> Any:
        return strategy.experimental_local_results(run(tf.constant(vector)))[0].numpy()

    return add_up


def sources(directory: Path, kind: str) -> Any:
    ids = np.arange(ROWS)
    if kind == "memory":
        return pd.DataFrame({"id": ids})
    (directory / "data").mkdir()
    for part, rows in enumerate(np.array_split(ids, 3)):
        path = directory / "data" / f"{part}.parquet"
        pq.write_table(pa.table({"id": rows}), path, row_group_size=16)
    return directory / "data"


def killed_and_resumed(
    quiet: RunConfig, backend: str, data: Any, add_up: Any, sizes: tuple[int, int], shuffle: Any
) -> tuple[Result, Diary]:
    """Kills at random steps, the last of which ends the run; another run resumes from there."""
    random = np.random.default_rng(sum(map(ord, f"{backend}{shuffle}{sizes}")))
    first, second = sizes
    total = EPOCHS * STEPS_PER_EPOCH
    steps = random.choice(np.arange(2, total - 1), 3, replace=False)
    early, late, last = sorted(steps.tolist())
    storage = Path(str(quiet.storage_path))
    diary = storage / "diary"
    diary.mkdir()

    def trainer(run: str, workers: int, kills: dict[int, list[int]], **arguments: Any) -> Any:
        return make_trainer(
            backend,
            train,
            train_loop_config={
                "run": run,
                "kills": kills,
                "diary": str(diary),
                "add_up": add_up,
            },
            datasets={"train": data},
            dataset_config={"train": DataConfig(shuffle=shuffle, window_rows=20)},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=dataclasses.replace(
                quiet, name=run, failure_config=FailureConfig(max_failures=1)
            ),
            **arguments,
        )

    # The last comes without progress since the one before.
    kills = {0: [first - 1, early], 1: [0, late], 2: [0, late]}
    with pytest.raises(TrainingFailedError) as caught:
        trainer("a", first, kills).fit()
    stopped = caught.value.result
    assert stopped is not None
    assert stopped.checkpoint is not None
    result = trainer("b", second, {0: [0, last]}, restore_from=stopped.checkpoint).fit()
    assert result.restarts == 1
    return result, Diary(diary)


def assert_exactly_once(diary: Diary, result: Result) -> None:
    """Every row is used once in every epoch, whatever has befallen the run."""
    # What the ranks have written down…
    steps = diary.steps_that_count()
    assert sorted(steps) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    for epoch in range(EPOCHS):
        first = epoch * STEPS_PER_EPOCH + 1
        used = [row for step in range(first, first + STEPS_PER_EPOCH) for row in steps[step]]
        assert sorted(used) == list(range(ROWS))
    # … and what their collective made of it.
    assert result.checkpoint is not None
    model = json.loads((Path(result.checkpoint.path) / "state.json").read_text())
    assert model["counts"] == [EPOCHS] * ROWS


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("backend", "add_up", "sizes", "kind", "shuffle"),
    [
        ("torch", with_torch, (2, 3), "files", "window"),
        ("torch", with_torch, (3, 2), "memory", True),
        ("xgboost", with_xgboost, (2, 3), "files", True),
        only_in_sweep("tensorflow", with_tensorflow, (3, 2), "files", False),
    ],
)
def test_every_row_is_used_once_per_epoch(
    quiet: RunConfig,
    tmp_path: Path,
    backend: str,
    add_up: Any,
    sizes: tuple[int, int],
    kind: str,
    shuffle: Any,
) -> None:
    data = sources(tmp_path, kind)
    result, diary = killed_and_resumed(quiet, backend, data, add_up, sizes, shuffle)
    assert diary.attempts == 5
    assert_exactly_once(diary, result)


def test_other_data_is_no_place_to_go_on(quiet: RunConfig, tmp_path: Path) -> None:
    """In the middle of an epoch rows have been added: refused before anything is started."""
    config: dict[str, Any] = {"run": "a", "kills": {0: [0, 5]}, "diary": str(tmp_path)}
    arguments = {"run_config": quiet, "train_loop_config": {**config, "add_up": alone}}
    data = {"id": np.arange(ROWS)}
    trainer = make_trainer("reference", train, datasets={"train": data}, **arguments)
    with pytest.raises(TrainingFailedError) as caught:
        trainer.fit()
    assert caught.value.result is not None
    more = {"id": np.arange(ROWS + 1)}
    trainer = make_trainer(
        "reference",
        train,
        datasets={"train": more},
        restore_from=caught.value.result.checkpoint,
        **arguments,
    )
    with pytest.raises(InvalidJobError, match=r"restore_from: .*rows=240 then, 241 now"):
        trainer.fit()


def alone() -> Any:
    return lambda vector: vector


def boost(config: Any) -> None:
    """Each round of LightGBM uses the whole shard: the ranks write down which rows they have."""
    import os
    import signal
    import tempfile

    import lightgbm

    from polytrain_lightgbm import network_params

    context = polytrain.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    table = polytrain.get_dataset_shard("train").to_arrow()
    rows = table.column("id").to_pylist()
    checkpoint = polytrain.get_checkpoint()
    initial = checkpoint and lightgbm.Booster(model_file=Path(checkpoint.path) / "model.txt")
    done = initial.num_trees() if initial else 0
    name = f"{config['run']}{attempt}-{rank}.jsonl"
    with (Path(config["diary"]) / name).open("w") as diary:
        print(json.dumps({"start": done}), file=diary, flush=True)

        def after_round(environment: Any) -> None:
            step = done + environment.iteration - environment.begin_iteration + 1
            print(json.dumps({"step": step, "rows": rows}), file=diary, flush=True)
            if config["kills"].get(attempt) == [rank, step]:
                os.kill(os.getpid(), signal.SIGKILL)
            with tempfile.TemporaryDirectory() as directory:
                if rank == 0:
                    environment.model.save_model(Path(directory) / "model.txt")
                polytrain.report(
                    {"step": step},
                    checkpoint=Checkpoint.from_directory(directory) if rank == 0 else None,
                )

        x = table.column("x").to_numpy()
        lightgbm.train(
            {"verbosity": -1, "min_data_in_leaf": 1, "num_threads": 1, **network_params()},
            lightgbm.Dataset(x.reshape(-1, 1), label=x),
            num_boost_round=config["rounds"] - done,
            init_model=initial,
            callbacks=[after_round],
        )


def test_every_round_of_boosting_uses_every_row_once(quiet: RunConfig, tmp_path: Path) -> None:
    """LightGBM's rounds, on two workers, and then on three."""
    ids = np.arange(ROWS)
    data = pd.DataFrame({"id": ids, "x": np.sin(ids)})
    diary = tmp_path / "diary"
    diary.mkdir()

    def trainer(run: str, workers: int, kills: dict[int, list[int]], **arguments: Any) -> Any:
        config = {"run": run, "kills": kills, "diary": str(diary), "rounds": 12}
        return make_trainer(
            "lightgbm",
            boost,
            train_loop_config=config,
            datasets={"train": data},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=dataclasses.replace(
                quiet, name=run, failure_config=FailureConfig(max_failures=1)
            ),
            **arguments,
        )

    with pytest.raises(TrainingFailedError) as caught:
        trainer("a", 2, {0: [1, 3], 1: [0, 6], 2: [0, 6]}).fit()
    assert caught.value.result is not None
    start = caught.value.result.checkpoint
    result = trainer("b", 3, {0: [2, 9]}, restore_from=start).fit()
    assert result.restarts == 1
    steps = Diary(diary).steps_that_count()
    assert sorted(steps) == list(range(1, 13))
    assert all(Counter(rows) == Counter(ids.tolist()) for rows in steps.values())


def load(config: Any) -> None:
    """A data loader with worker processes; all ranks together count how often each item came."""
    import os
    import signal
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from polytrain_torch import prepare_data_loader

    context = polytrain.get_context()
    rank = context.get_world_rank()
    counts, step = torch.zeros(ROWS), 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state = torch.load(Path(checkpoint.path) / "state.pt", weights_only=True)
        counts, step = state["counts"], state["step"]
    loader = prepare_data_loader(
        DataLoader(torch.arange(ROWS), batch_size=8, shuffle=True, num_workers=1)
    )
    while step < config["steps"]:
        for batch in loader:
            step += 1
            new = torch.bincount(batch, minlength=ROWS).float()
            dist.all_reduce(new)
            counts += new
            if context.get_attempt() == 0 and [rank, step] == config["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            with tempfile.TemporaryDirectory() as directory:
                torch.save({"counts": counts, "step": step}, Path(directory) / "state.pt")
                polytrain.report(
                    {"largest": counts.max(), "smallest": counts.min(), "step": step},
                    checkpoint=Checkpoint.from_directory(directory) if rank == 0 else None,
                )


def test_a_data_loader_goes_on_where_it_was(quiet: RunConfig) -> None:
    """Two epochs on two ranks, one of which is killed in the middle of the first."""
    steps = 2 * ROWS // 16
    result = make_trainer(
        "torch",
        load,
        train_loop_config={"steps": steps, "kill": [1, 7]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.restarts == 1
    assert result.metrics == {"largest": 2.0, "smallest": 2.0, "step": steps}
