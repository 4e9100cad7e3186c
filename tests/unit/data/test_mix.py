"""Mixes of data sets: what a shard gives of them, and what is refused before a worker starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.problems import FindProblems
from tests.shards import shard_of

from polytrain import DataConfig, InvalidJobError, Mix, ScalingConfig, Trainer
from polytrain.backends.reference import Reference
from polytrain.data.plan.position import DataChangedError

CODE, WEB = np.arange(100), np.arange(1000, 4000)
WEIGHTS = {"code": 0.3, "web": 0.7}


class Items:
    """The same rows as `CODE`, one by one."""

    def __len__(self) -> int:
        return len(CODE)

    def __getitem__(self, index: int) -> dict[str, int]:
        if index >= len(CODE):
            raise IndexError(index)
        return {"x": index}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The same rows as `WEB`, in files with two types of numbers."""
    tmp_path = tmp_path / "web"
    tmp_path.mkdir()
    for number, kind in enumerate((np.int64, np.int32)):
        rows = np.array_split(WEB, 2)[number].astype(kind)
        pq.write_table(pa.table({"x": rows}), tmp_path / f"{number}.parquet", row_group_size=400)
    return tmp_path


def rows_of(data: Any, world_size: int = 1, epochs: int = 1, **config: Any) -> list[list[int]]:
    """The rows of each epoch: batch by batch, rank by rank."""
    ranks = [shard_of(data, world_size=world_size, rank=r, **config) for r in range(world_size)]
    loops = [shard.iter_batches(global_batch_size=24) for shard in ranks]
    return [
        [int(row) for batch in zip(*loops, strict=True) for part in batch for row in part["x"]]
        for _ in range(epochs)
    ]


@pytest.mark.parametrize("epoch", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_sources_of_any_kind_give_the_same_rows_in_the_same_order(
    shuffle: Any, epoch: Any, files: Path
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "window_rows": 64, "seed": 5}
    in_memory = Mix({"code": {"x": CODE}, "web": {"x": WEB}}, weights=WEIGHTS, epoch=epoch)
    wanted = rows_of(in_memory, 1, 2, **options)
    code = files.parent / "code.parquet"
    pq.write_table(pa.table({"x": CODE}), code, row_group_size=30)
    for sources in (
        {"code": Items(), "web": files},
        {"code": code, "web": files},
        {"code": {"x": CODE.astype(np.int16)}, "web": files},
        {"code": [{"x": int(x)} for x in CODE], "web": pa.table({"x": WEB})},
    ):
        assert rows_of(Mix(sources, weights=WEIGHTS, epoch=epoch), 3, 2, **options) == wanted


@pytest.mark.parametrize("shuffle", [False, "window"])
def test_items_beside_files_are_read_one_by_one(
    shuffle: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    own = Items.__getitem__

    def noted(self: Items, index: int) -> dict[str, int]:
        read.append(index)
        return own(self, index)

    monkeypatch.setattr(Items, "__getitem__", noted)
    mix = Mix({"code": Items(), "web": files}, weights=WEIGHTS)
    loop = iter(shard_of(mix, shuffle=shuffle).iter_batches(batch_size=10))
    read.clear()
    given = [int(row) for _ in range(4) for row in next(loop)["x"]]
    assert read == [row for row in given if row < 1000]


def test_an_epoch_ends_with_the_first_source_that_is_exhausted() -> None:
    mix = Mix({"code": {"x": CODE}, "web": {"x": WEB}}, weights=WEIGHTS)
    first, second = rows_of(mix, epochs=2, shuffle=True)
    for rows in (first, second):
        assert sorted(row for row in rows if row < 1000) == CODE.tolist()
        assert len({*rows}) == len(rows)
    # The other one continues where it was.
    assert not {row for row in first if row >= 1000} & {row for row in second if row >= 1000}


def test_an_epoch_may_end_with_the_last_source_or_after_a_number_of_rows() -> None:
    sources = {"code": {"x": CODE}, "web": {"x": WEB}}
    [rows] = rows_of(Mix(sources, weights=WEIGHTS, epoch="all_exhausted"), shuffle=True)
    assert sorted(row for row in rows if row >= 1000) == WEB.tolist()
    counts = [rows.count(row) for row in CODE.tolist()]
    assert set(counts) <= {len(rows) * 3 // 1000, len(rows) * 3 // 1000 + 1}
    [rows] = rows_of(Mix(sources, weights=WEIGHTS, epoch=77), shuffle=True)
    assert len(rows) == 77
    assert sum(row < 1000 for row in rows) == 23


def test_a_source_of_one_is_the_data_set_itself() -> None:
    alone = Mix({"web": {"x": WEB}}, weights={"web": 2})
    assert rows_of(alone, epochs=3, shuffle=True) == rows_of({"x": WEB}, epochs=3, shuffle=True)


@pytest.mark.parametrize("start", [24, 48, 144])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_resumes_in_an_epoch_at_another_size(
    start: int, world_size: int, files: Path
) -> None:
    mix = Mix({"code": Items(), "web": files}, weights=WEIGHTS)
    options: dict[str, Any] = {"shuffle": "window", "window_rows": 64}
    first = shard_of(mix, world_size=2, **options)
    for _, _ in zip(range(start // 24), first.iter_batches(global_batch_size=24), strict=False):
        position = first.cursor.recorded().to_plain()
    [rest] = rows_of(mix, world_size, position=position, **options)
    assert rest == rows_of(mix, **options)[0][start:]


def test_virtual_workers_get_the_same_micro_batches_on_any_number_of_workers() -> None:
    mix = Mix({"code": {"x": CODE}, "web": {"x": WEB}}, weights=WEIGHTS)

    def found(world_size: int) -> list[dict[int, list[int]]]:
        shards = [
            shard_of(mix, world_size=world_size, rank=rank, virtual_workers=4, shuffle=True)
            for rank in range(world_size)
        ]
        return [
            {
                micro.virtual_worker: micro.content["x"].tolist()
                for part in batch
                for micro in part.micro_batches
            }
            for batch in zip(
                *(shard.iter_batches(global_batch_size=24) for shard in shards), strict=True
            )
        ]

    assert found(1) == found(2) == found(4)
    [rows] = rows_of(mix, shuffle=True)
    assert [*chain(*(found(2)[0][number] for number in range(4)))] == rows[:24]


def test_missing_values_of_one_source_decide_the_type_of_all() -> None:
    sources = {"code": {"x": pa.array([1, None])}, "web": {"x": pa.array([3, 4, 5])}}
    shard = shard_of(Mix(sources, weights={"code": 1, "web": 3}))
    types = {batch["x"].dtype for batch in shard.iter_batches(batch_size=1)}
    assert types == {np.dtype(np.float64)}


def test_files_of_text_are_read_in_the_types_of_the_mix(tmp_path: Path) -> None:
    """As among the files of one data set: an empty field of a column of text is text."""
    files = {name: tmp_path / f"{name}.csv" for name in ("empty", "full", "large", "half")}
    for file, value in zip(files.values(), ("", "a", 2**53 + 1, 0.5), strict=True):
        file.write_text(f"n,x\n1,{value}\n")
    weights = {"code": 1, "web": 1}
    mix = Mix({"code": files["empty"], "web": files["full"]}, weights=weights)
    [batch] = shard_of(mix, columns=["x"]).iter_batches(batch_size=2)
    assert batch["x"].tolist() == ["", "a"]
    with pytest.raises(InvalidJobError, match="would round 9007199254740993"):
        shard_of(Mix({"code": files["large"], "web": files["half"]}, weights=weights))


def test_a_transform_is_applied_to_each_source() -> None:
    sources = {"code": {"text": ["a", "bb"]}, "web": {"text": ["ccc", "dddd"]}}
    mix = Mix(sources, weights={"code": 1, "web": 1})
    lengths = {"transform": lambda batch: {"x": np.array([*map(len, batch["text"])])}}
    assert rows_of(mix, **lengths) == [[1, 3, 2, 4]]


def test_another_mix_is_no_place_to_resume(files: Path) -> None:
    sources: dict[str, Any] = {"code": {"x": CODE}, "web": files}
    first = shard_of(Mix(sources, weights=WEIGHTS))
    loop = iter(first.iter_batches(batch_size=8))
    next(loop)
    position = first.cursor.recorded().to_plain()
    for other, what in (
        (Mix(sources, weights={"code": 0.4, "web": 0.6}), "other sources, weights or sizes"),
        (Mix({**sources, "code": {"x": CODE + 1}}, weights=WEIGHTS), "'x' in the source 'code'"),
        ({"x": CODE}, "a mix then, a table now"),
    ):
        with pytest.raises(DataChangedError, match=what):
            shard_of(other, position=position)
    (files / "1.parquet").rename(files / "2.parquet")
    assert shard_of(Mix(sources, weights=WEIGHTS), position=position).cursor.position.start == 8


# What is refused

GOOD: dict[str, Any] = {"code": {"x": CODE}, "web": {"x": WEB}}


@pytest.mark.parametrize(
    ("weights", "field", "what"),
    [
        ({"code": 1}, "weights['web']", "it is missing"),
        ({**WEIGHTS, "wbe": 1}, "weights['wbe']", "there is no such source"),
        ({"code": -1, "web": 1}, "weights['code']", "it is -1"),
        ({"code": 0, "web": 1}, "weights['code']", "it is 0"),
        ({"code": math.nan, "web": 1}, "weights['code']", "it is nan"),
        ({"code": math.inf, "web": 1}, "weights['code']", "it is inf"),
        ({"code": "0.3", "web": 1}, "weights['code']", "it is '0.3'"),
        ({"code": True, "web": 1}, "weights['code']", "it is True"),
        ({"code": np.True_, "web": 1}, "weights['code']", "it is np.True_"),
        ([0.3, 0.7], "weights", "it is a list, not numbers by the sources' names"),
    ],
)
def test_a_wrong_weight_is_named(
    weights: Any, field: str, what: str, problems: FindProblems
) -> None:
    found = problems(function=len, datasets={"train": Mix(GOOD, weights=weights)})
    assert found.only(f"datasets['train'].{field}").what == what


@pytest.mark.parametrize("epoch", [0, -1, 1.5, True, None, "first"])
def test_a_wrong_epoch_is_named(epoch: Any, problems: FindProblems) -> None:
    found = problems(function=len, datasets={"train": Mix(GOOD, weights=WEIGHTS, epoch=epoch)})
    assert repr(epoch) in found.only("datasets['train'].epoch").what


@pytest.mark.parametrize(
    ("web", "where", "what"),
    [
        ({"x": np.array([], np.int64)}, ".sources['web']", "it has no rows"),
        ("nowhere.parquet", ".sources['web']", "nowhere.parquet"),
        (Mix(GOOD, weights=WEIGHTS), ".sources['web']", "can't be a source of another one"),
        ({"y": WEB}, "", "the source 'web' has no column 'x', which the source 'code' has"),
        ({"x": WEB, "y": WEB}, "", "the source 'code' has no column 'y', which the source 'web'"),
        ({"x": ["a"]}, "", "'x' is int64 in the source 'code' and string in the source 'web'"),
    ],
)
def test_a_wrong_source_is_named(web: Any, where: str, what: str, problems: FindProblems) -> None:
    mix = Mix({"code": {"x": CODE}, "web": web}, weights=WEIGHTS)
    found = problems(function=len, datasets={"train": mix})
    assert what in found.only(f"datasets['train']{where}").what


@pytest.mark.parametrize("sources", [{}, [{"x": CODE}], None])
def test_sources_have_names(sources: Any, problems: FindProblems) -> None:
    found = problems(function=len, datasets={"train": Mix(sources, weights=WEIGHTS)})
    assert "not data sets by name" in found.only("datasets['train'].sources").what


def test_all_that_is_wrong_comes_at_once(problems: FindProblems) -> None:
    mix = Mix({"code": {"x": []}, "web": "nowhere.parquet"}, weights={"code": 0}, epoch=0)
    found = problems(
        function=len,
        datasets={"train": mix},
        dataset_config={"train": DataConfig(shards=2, group="x")},
    )
    assert set(found) == {
        "datasets['train'].sources['code']",
        "datasets['train'].sources['web']",
        "datasets['train'].weights['code']",
        "datasets['train'].weights['web']",
        "datasets['train'].epoch",
        "dataset_config['train'].shards",
        "dataset_config['train'].group",
    }


def test_a_mix_is_for_training(problems: FindProblems) -> None:
    mix = Mix(GOOD, weights=WEIGHTS)
    found = problems(function=len, datasets={"train": {"x": CODE}, "valid": mix})
    assert "is for the data set 'train'" in found.only("datasets['valid']").what


def test_boosters_have_no_mix(problems: FindProblems) -> None:
    labelled: Mapping[str, Any] = {each: {"x": CODE, "label": CODE} for each in ("code", "web")}
    mix = Mix(labelled, weights=WEIGHTS)
    found = problems("reference", label="label", datasets={"train": mix})
    assert "reads all rows at once" in found.only("datasets['train']").what


def test_a_mix_with_fewer_rows_than_workers_is_refused() -> None:
    mix = Mix({"code": {"x": [1]}, "web": {"x": [2]}}, weights={"code": 1, "web": 1})
    Trainer(Reference(), lambda: None, datasets={"train": mix})
    short = Mix({"code": {"x": [1]}}, weights={"code": 1})

    with pytest.raises(InvalidJobError, match="1 row"):
        Trainer(
            Reference(),
            lambda: None,
            datasets={"train": short},
            scaling_config=ScalingConfig(num_workers=2),
        )
