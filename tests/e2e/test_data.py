"""Data on real workers: every kind of source, groups, streams, and what stops a run.

Workers import this module for its functions: Ray is imported where a test uses it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from ast import literal_eval
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.object_storage import s3_server
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    DataConfig,
    FailureConfig,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.checkpoint.manifest import MANIFEST_NAME

ROWS = 101
"""A prime number: no world size divides it."""

WORKERS = ScalingConfig(num_workers=3)


def rows_of(directory: Path) -> list[list[int]]:
    """What each rank has written down."""
    return [json.loads(file.read_text()) for file in sorted((directory / "seen").iterdir())]


def noting(directory: Path) -> dict[str, Any]:
    """What a trainer takes so that its workers write down which rows they have seen."""
    (directory / "seen").mkdir()
    return {
        "train_loop_per_worker": write_down_rows,
        "train_loop_config": {"seen": str(directory / "seen")},
        "scaling_config": WORKERS,
    }


def write_down_rows(config: dict[str, Any]) -> None:
    """Two epochs; the ranks note the rows of the second one."""
    shard = polytrain.get_dataset_shard("train")
    for _ in range(2):
        rows = [int(row) for batch in shard.iter_batches(batch_size=7) for row in batch["id"]]
    rank = polytrain.get_context().get_world_rank()
    (Path(config["seen"]) / str(rank)).write_text(json.dumps(rows))
    polytrain.report({"rows": len(rows)})


class Items:
    """A map-style data set, as torch's are."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "image": np.full((2, 2), index, dtype=np.float32)}


def in_polars(_: Path) -> Any:
    import polars

    return polars.DataFrame({"id": np.arange(ROWS)})


def in_hugging_face(_: Path) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(ROWS))[::-1]}).shuffle(seed=0)


def in_files(directory: Path) -> Any:
    path = directory / "données à lire"
    (path / "year=2024").mkdir(parents=True)
    (path / "year=2025").mkdir()
    table = pa.table({"id": np.arange(ROWS)})
    pq.write_table(table.slice(0, 60), path / "year=2024" / "a.parquet", row_group_size=7)
    pq.write_table(table.slice(60, 0), path / "year=2024" / "empty.parquet")
    pq.write_table(table.slice(60), path / "year=2025" / "b.parquet")
    return path


def in_ray(blocks: int | None = None) -> Any:
    import ray.data

    return ray.data.range(ROWS, override_num_blocks=blocks)


SOURCES = {
    "pandas": lambda _: pd.DataFrame({"id": np.arange(ROWS)}),
    "polars": in_polars,
    "hugging face": in_hugging_face,
    "map-style": lambda _: Items(),
    "partitioned files": in_files,
    "arrow dataset": lambda path: pa.dataset.dataset(in_files(path), partitioning="hive"),
    "ray": lambda _: in_ray(blocks=7).map_batches(lambda b: b),
    "ray, computed": lambda _: in_ray(blocks=7).materialize(),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("source", "shuffle"),
    [
        ("pandas", True),
        ("polars", "window"),
        ("hugging face", False),
        ("map-style", True),
        ("partitioned files", "window"),
        ("arrow dataset", True),
        pytest.param("ray", False, marks=[pytest.mark.on_ray, pytest.mark.only_in_sweep]),
        pytest.param("ray, computed", True, marks=pytest.mark.on_ray),
    ],
)
def test_every_row_is_on_one_worker(
    quiet: RunConfig, tmp_path: Path, source: str, shuffle: Any
) -> None:
    make_trainer(
        "reference",
        **noting(tmp_path),
        datasets={"train": SOURCES[source](tmp_path)},
        dataset_config={"train": DataConfig(shuffle=shuffle, window_rows=10)},
        run_config=quiet,
    ).fit()
    seen = rows_of(tmp_path)
    assert sorted(row for of_rank in seen for row in of_rank) == list(range(ROWS))
    assert max(map(len, seen)) - min(map(len, seen)) <= ROWS // 7 // 3 + 1


def test_object_storage(quiet: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents and trainers find the server as the driver does, by their environment."""
    with s3_server() as server:
        server.set_environment(monkeypatch)
        bucket = server.make_bucket("bucket")
        for part, ids in enumerate(np.array_split(np.arange(ROWS), 3)):
            sink = pa.BufferOutputStream()
            pq.write_table(pa.table({"id": ids}), sink, row_group_size=10)
            bucket.put({f"train/part {part}.parquet": sink.getvalue().to_pybytes()})

        def train(config: dict[str, Any]) -> None:
            import os

            os.environ.update(environment)
            write_down_rows(config)

        environment = dict(server.environment)
        make_trainer(
            "reference",
            **{**noting(tmp_path), "train_loop_per_worker": train},
            datasets={"train": "s3://bucket/train"},
            run_config=quiet,
        ).fit()
        assert sorted(row for rank in rows_of(tmp_path) for row in rank) == list(range(ROWS))


def test_columns_and_transform(quiet: RunConfig, tmp_path: Path) -> None:
    def doubled(batch: dict[str, Any]) -> dict[str, Any]:
        assert set(batch) == {"id"}
        return {"id": batch["id"], "twice": batch["id"] * 2}

    def train(config: dict[str, Any]) -> None:
        for batch in polytrain.get_dataset_shard("train").iter_batches(batch_size=8):
            assert sorted(batch) == ["id", "twice"]
            assert (batch["twice"] == 2 * batch["id"]).all()
        write_down_rows(config)

    make_trainer(
        "reference",
        **{**noting(tmp_path), "train_loop_per_worker": train},
        datasets={"train": in_files(tmp_path)},
        dataset_config={"train": DataConfig(columns=["id"], transform=doubled)},
        run_config=quiet,
    ).fit()
    assert sorted(row for rank in rows_of(tmp_path) for row in rank) == list(range(ROWS))


def test_a_transform_that_fails_is_reported_with_its_rows(quiet: RunConfig, tmp_path: Path) -> None:
    def picky(batch: dict[str, Any]) -> dict[str, Any]:
        if 65 in batch["id"]:
            raise ValueError("no 65 here")
        return batch

    trainer = make_trainer(
        "reference",
        **noting(tmp_path),
        datasets={"train": in_files(tmp_path)},
        dataset_config={"train": DataConfig(transform=picky)},
        run_config=quiet,
    )
    line = picky.__code__.co_firstlineno + 2
    place = rf"{re.escape(__file__)}, line {line}, in picky"
    found = rf"^rank \d( on \S+)?: ValueError: no 65 here \({place}\)"
    with pytest.raises(TrainingFailedError, match=found) as caught:
        trainer.fit()
    assert "of 'train'" in str(caught.value)
    assert "b.parquet" in str(caught.value)


@pytest.mark.parametrize(("backend", "option"), [("xgboost", "qid"), ("lightgbm", "group")])
def test_queries_stay_whole_on_one_worker(quiet: RunConfig, backend: str, option: str) -> None:
    """Ranking: a worker that got half a query would be wrong about it, or fail."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 30, 40)
    query = np.repeat(np.arange(len(sizes)), sizes)
    x = random.normal(size=(len(query), 3))
    data = pd.DataFrame(x, columns=["a", "b", "c"])
    data["relevance"] = np.clip(np.round(x[:, 0] + 1), 0, 3).astype(int)
    data["query"] = [f"q{number}" for number in query]
    objective = {"xgboost": "rank:ndcg", "lightgbm": "lambdarank"}[backend]
    result = make_trainer(
        backend,
        params={"objective": objective},
        label="relevance",
        datasets={"train": data},
        scaling_config=WORKERS,
        run_config=quiet,
        **{option: "query"},
    ).fit()
    model = result.load_model()
    names = model.feature_names if backend == "xgboost" else model.feature_name()
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize("backend", ["xgboost", "lightgbm"])
def test_workers_that_see_one_class_each(quiet: RunConfig, backend: str) -> None:
    """Sorted by label: a worker's share is of one class, and one evaluation set has few rows."""
    x = np.sort(np.random.default_rng(0).normal(size=300))
    data = pd.DataFrame({"x": x, "y": (x > 0).astype(int)})
    objective = {"xgboost": "binary:logistic", "lightgbm": "binary"}[backend]
    result = make_trainer(
        backend,
        params={"objective": objective},
        label="y",
        datasets={"train": data, "valid": data.iloc[:2]},
        scaling_config=WORKERS,
        run_config=quiet,
    ).fit()
    model = result.load_model()
    if backend == "xgboost":
        import xgboost

        predicted = model.predict(xgboost.DMatrix(data[["x"]]))
    else:
        predicted = model.predict(data[["x"]])
    assert ((predicted > 0.5) == (x > 0)).mean() > 0.95


def noted_by(config: Any, step: int) -> int:
    """How many ranks have noted so many batches of the first attempt."""
    notes = Path(config["notes"]).glob(f"{config['run']}0-*")
    return sum(len(of_rank.read_text().splitlines()) >= step for of_rank in notes)


def note_and_fail(config: Any) -> None:
    """Notes each batch, and ends the process in the middle of the first epoch of attempt 0."""
    import os
    import signal
    import tempfile

    context = polytrain.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    checkpoint = polytrain.get_checkpoint()
    step = int((Path(checkpoint.path) / "step").read_text()) if checkpoint else 0
    name = f"{config['run']}{attempt}-{rank}"
    with (Path(config["notes"]) / name).open("w") as notes:
        shard = polytrain.get_dataset_shard("train")
        for batch in shard.iter_batches(batch_size=5):
            step += 1
            print(json.dumps([step, batch["id"].tolist()]), file=notes, flush=True)
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "step").write_text(str(step))
                polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
            if attempt == 0 and step == config["fails_after"]:
                # Only once what all have noted is stored is there something to resume from.
                while noted_by(config, step) < context.get_world_size():
                    pass
                while not any(Path(config["run_path"]).glob(config["wait_for"])):
                    pass
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.on_ray
@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(2), 3])
def test_a_stream_goes_on_after_a_crash(quiet: RunConfig, tmp_path: Path, workers: int) -> None:
    """An ordered pipeline: exactly once, at the same number of workers and at another."""
    data = in_ray(blocks=9).map_batches(lambda batch: batch)
    notes = tmp_path / "notes"
    notes.mkdir()

    def trainer(run: str, size: int, **arguments: Any) -> Any:
        return make_trainer(
            "reference",
            note_and_fail,
            train_loop_config={
                "run": run,
                "run_path": str(Path(str(quiet.storage_path)) / run),
                "notes": str(notes),
                "fails_after": 4 if run == "a" else 0,
                "wait_for": f"checkpoints/checkpoint_000003-*/{MANIFEST_NAME}",
            },
            datasets={"train": data},
            scaling_config=ScalingConfig(num_workers=size),
            run_config=dataclasses.replace(quiet, name=run),
            **arguments,
        )

    with pytest.raises(TrainingFailedError) as caught:
        trainer("a", 2).fit()
    assert caught.value.result is not None
    trainer("b", workers, restore_from=caught.value.result.checkpoint).fit()
    used: list[int] = []
    for file in notes.iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        used += [row for step, rows in lines if file.name[0] == "b" or step <= 4 for row in rows]
    assert sorted(used) == list(range(ROWS))
    logs = Path(os.environ["RAY_TMPDIR"], "ray", "session_latest", "logs").glob("worker-*")
    assert [log.name for log in logs if "blocking ray.get" in log.read_text()] == []


@pytest.mark.on_ray
def test_a_stream_that_fails_says_why(quiet: RunConfig, tmp_path: Path) -> None:
    def explode(batch: dict[str, Any]) -> dict[str, Any]:
        if 50 in batch["id"]:
            raise ValueError("row 50 is bad")
        return batch

    data = in_ray(blocks=9).map_batches(explode)
    trainer = make_trainer(
        "reference",
        **noting(tmp_path),
        datasets={"train": data},
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=0)),
    )
    line = explode.__code__.co_firstlineno + 2
    found = rf"ValueError: row 50 is bad \({re.escape(__file__)}, line {line}, in explode\): the "
    with pytest.raises(
        TrainingFailedError, match=rf"^rank \d( on \S+)?: {found}pipeline of .* 'train'"
    ):
        trainer.fit()


@pytest.mark.on_ray
def test_without_a_spare_cpu_a_pipeline_runs_first(
    quiet: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(
        "reference",
        **{**noting(tmp_path), "scaling_config": ScalingConfig(num_workers=4)},
        datasets={"train": in_ray().map_batches(lambda batch: batch)},
        run_config=quiet,
    ).fit()
    assert sorted(row for rank in rows_of(tmp_path) for row in rank) == list(range(ROWS))
    assert "'train' is computed first: its pipeline needs a CPU" in caplog.text


@pytest.mark.on_ray
def test_a_stream_is_not_shuffled_here(quiet: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"random_shuffle.*materialize"):
        make_trainer(
            "reference",
            **noting(tmp_path),
            datasets={"train": in_ray().map_batches(lambda batch: batch)},
            dataset_config={"train": DataConfig(shuffle=True)},
            run_config=quiet,
        )


def test_files_that_change_stop_the_run(quiet: RunConfig, tmp_path: Path) -> None:
    """Between the description and the first batch somebody replaces a file."""
    data = in_files(tmp_path)
    trainer = make_trainer(
        "reference",
        **noting(tmp_path),
        datasets={"train": data},
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=0)),
    )
    pq.write_table(pa.table({"id": np.arange(5)}), data / "year=2025" / "b.parquet")
    with pytest.raises(TrainingFailedError, match=r"b\.parquet.*changed"):
        trainer.fit()


@pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=pytest.mark.on_ray)])
def test_workers_hold_tables_of_the_driver_once(
    cluster: Any, quiet: RunConfig, tmp_path: Path
) -> None:
    """Every worker maps the same memory, Ray's own where there is one: nobody has a copy."""
    rows = 1_000_000

    def train() -> None:
        polytrain.get_dataset_shard("train").to_arrow()
        large = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, device, inode, *_ = line.split()
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if stop - start >= 8 * rows and inode != "0":
                large.append((device, inode))
        rank = polytrain.get_context().get_world_rank()
        (tmp_path / f"rank-{rank}").write_text(repr(large))

    make_trainer(
        "reference",
        train,
        datasets={"train": pd.DataFrame({"x": np.arange(float(rows))})},
        scaling_config=ScalingConfig(num_workers=2, cluster=cluster),
        run_config=quiet,
    ).fit()
    first, second = (set(literal_eval((tmp_path / f"rank-{rank}").read_text())) for rank in (0, 1))
    assert first & second
