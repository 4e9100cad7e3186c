"""A finished run of the same name: its result, unless something else is asked for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import polytrain
from polytrain import (
    DataConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.backends.reference import Reference

ROWS = 20_000


def add_up(config: Mapping[str, Any]) -> None:
    shard = polytrain.get_dataset_shard("train")
    total = sum(float(batch["x"].sum()) for batch in shard.iter_batches(batch_size=5000))
    polytrain.report({"total": total * config["factor"]})


def add_up_half(config: Mapping[str, Any]) -> None:
    shard = polytrain.get_dataset_shard("train")
    total = sum(float(batch["x"].sum()) for batch in shard.iter_batches(batch_size=5000))
    polytrain.report({"total": total * config["factor"] / 2})


def fit(quiet: RunConfig, *, if_finished: Any = None, **options: Any) -> Result:
    arguments: dict[str, Any] = {
        "train_loop_per_worker": add_up,
        "train_loop_config": {"factor": 1},
        "datasets": {"train": {"x": np.arange(ROWS)}},
        "scaling_config": ScalingConfig(num_workers=0),
        "run_config": dataclasses.replace(quiet, name="sums", if_finished=if_finished),
    }
    return make_trainer("reference", **{**arguments, **options}).fit()


TOTAL = float(np.arange(ROWS).sum())

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "function": ({"train_loop_per_worker": add_up_half}, "train_loop_per_worker: its code"),
    "config": ({"train_loop_config": {"factor": 3}}, r"train_loop_config: .* now .*'factor': 3"),
    "data": (
        {"datasets": {"train": {"x": np.r_[np.arange(ROWS - 1), 7]}}},
        r"datasets\['train'\]: its rows differ",
    ),
    "transform": (
        {"dataset_config": {"train": DataConfig(transform=lambda rows: rows)}},
        r"dataset_config\['train'\]\.transform: its code",
    ),
    "order": (
        {"dataset_config": {"train": DataConfig(shuffle=True)}},
        r"dataset_config\['train'\]\.shuffle: the run was trained with",
    ),
}


@pytest.mark.parametrize(("options", "message"), CHANGES.values(), ids=CHANGES)
def test_another_job_does_not_get_the_old_result(
    quiet: RunConfig, options: dict[str, Any], message: str
) -> None:
    first = fit(quiet)
    with pytest.raises(InvalidJobError, match=message):
        fit(quiet, **options)
    assert fit(quiet, if_finished="return", **options).metrics == first.metrics
    assert fit(quiet).metrics == {"total": TOTAL}


def test_it_is_trained_again_where_that_is_wanted(quiet: RunConfig) -> None:
    fit(quiet)
    again = fit(quiet, if_finished="new", train_loop_config={"factor": 3})
    assert again.history == ({"total": 3 * TOTAL},)
    assert fit(quiet, train_loop_config={"factor": 3}).metrics == again.metrics


def test_a_finished_run_may_be_an_error(quiet: RunConfig) -> None:
    assert fit(quiet, if_finished="error").metrics == {"total": TOTAL}
    with pytest.raises(InvalidJobError, match=r"RunConfig\.if_finished: .* is finished"):
        fit(quiet, if_finished="error")


def count() -> None:
    for step in range(5):
        polytrain.report({"step": step})


@pytest.mark.parametrize(
    ("if_finished", "steps", "restarts"), [(None, 3, 1), ("return", 2, 0), ("new", 3, 0)]
)
def test_a_run_that_a_condition_has_ended_is_finished(
    quiet: RunConfig, if_finished: Any, steps: int, restarts: int
) -> None:
    def until(step: int, **more: Any) -> Result:
        config = dataclasses.replace(quiet, stop={"training_iteration": step})
        return fit(config, train_loop_per_worker=count, train_loop_config=None, datasets={}, **more)

    assert len(until(2).history) == 2
    again = until(3, if_finished=if_finished)
    assert (len(again.history), again.restarts) == (steps, restarts)


class Other(Reference):
    name: ClassVar[str] = "other"


def test_the_result_of_another_backend_s_run_is_that_backend_s(quiet: RunConfig) -> None:
    fit(quiet)
    config = dataclasses.replace(quiet, name="sums", if_finished="return")
    trainer = Trainer(
        Other(), add_up, scaling_config=ScalingConfig(num_workers=0), run_config=config
    )
    assert type(trainer.fit().backend) is Reference


def test_a_word_that_is_unknown(quiet: RunConfig) -> None:
    with pytest.raises(InvalidJobError, match="'return' or 'error' or 'new'"):
        fit(quiet, if_finished="again")


SQUARES: dict[int, int] = {}
FACTOR = {"of": 1}


def remember() -> None:
    SQUARES[3] = SQUARES.get(3, 9)
    polytrain.report({"square": SQUARES[3] * FACTOR["of"]})


def test_what_training_itself_fills_in_this_process_is_no_change(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SQUARES", {})
    first = fit(quiet, train_loop_per_worker=remember, train_loop_config=None)
    assert SQUARES == {3: 9}
    assert fit(quiet, train_loop_per_worker=remember, train_loop_config=None).path == first.path
    # A new process has what it had before.
    SQUARES.clear()
    fit(quiet, train_loop_per_worker=remember, train_loop_config=None)
    monkeypatch.setitem(FACTOR, "of", 2)
    with pytest.raises(InvalidJobError, match="a value that it uses"):
        fit(quiet, train_loop_per_worker=remember, train_loop_config=None)


class Items:
    """A map-style data set."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": float(index)}


def frame(changed: bool) -> pd.DataFrame:
    values = np.arange(ROWS, dtype="float32")
    # Far from the rows that a sample would have.
    values[17] += changed
    return pd.DataFrame({"x": values, "word": ["a", "b"] * (ROWS // 2)})


def words(changed: bool) -> pa.Table:
    return pa.table({"x": np.arange(4), "word": ["a", "b", "c", "e" if changed else "d"]})


def parquet(changed: bool, directory: Path) -> str:
    path = directory / "rows.parquet"
    # The same length and time: what is in it counts.
    pq.write_table(pa.table({"x": np.arange(40) + changed}), path, row_group_size=10)
    os.utime(path, ns=(0, 0))
    return str(path)


def csv(changed: bool, directory: Path) -> str:
    path = directory / "rows.csv"
    path.write_text("x\n1\n2\n" + "3\n" * changed)
    os.utime(path, ns=(0, 0))
    return str(path)


@pytest.mark.parametrize(
    "data",
    [
        lambda changed, _: frame(changed),
        lambda changed, _: words(changed),
        lambda changed, _: Items(50 + changed),
        lambda changed, _: {"x": np.arange(24.0).reshape(4, 6) + changed},
        parquet,
        csv,
    ],
    ids=["pandas", "strings", "map-style", "tensors", "parquet", "csv"],
)
def test_other_rows_are_known(
    quiet: RunConfig, tmp_path: Path, data: Callable[[bool, Path], Any]
) -> None:
    fit(quiet, datasets={"train": data(False, tmp_path)})
    fit(quiet, datasets={"train": data(False, tmp_path)})
    with pytest.raises(InvalidJobError, match=r"datasets\['train'\]"):
        fit(quiet, datasets={"train": data(True, tmp_path)})
