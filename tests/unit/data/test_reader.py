"""A shard in a trainer: read as a whole, in batches of every format, from where a run stands."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
import tracemalloc
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.shards import shard_of
from tests.unit.data.collected import collect_while_a_thread_starts

from polytrain import DataConfig, RunConfig, ScalingConfig
from polytrain.api.config_checks import config_problems
from polytrain.data.checks import warn_of_read_amplification
from polytrain.data.fingerprint import digests
from polytrain.data.read.describe import describe
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.shards.groups import group_starts
from polytrain.data.shards.opening import open_shards
from polytrain.data.shards.rows_shard import RowsShard
from polytrain.data.shards.spec import ShardSpec

ROWS = 11
TABLE = pa.table(
    {
        "number": np.arange(ROWS, dtype=np.float32),
        "word": [f"word {row}" for row in range(ROWS)],
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3)
        ),
    }
)


def shard(data: Any = TABLE, **arguments: Any) -> RowsShard:
    return shard_of(data, **arguments)


def numbers(batches: Iterable[Any], column: str = "id") -> list[list[int]]:
    return [[int(value) for value in batch[column]] for batch in batches]


def global_batches(data: Any, world_size: int, **config: Any) -> list[list[int]]:
    """The rows of each global batch of a new run's first epoch."""
    world = [shard(data, world_size=world_size, rank=rank, **config) for rank in range(world_size)]
    batches = [numbers(one.iter_batches(global_batch_size=90)) for one in world]
    return [sorted(chain(*parts)) for parts in zip(*batches, strict=True)]


def files(directory: Path, rows: int = 1000, row_group_size: int = 64) -> str:
    directory.mkdir()
    for part, start in enumerate(range(0, rows, 300)):
        ids = np.arange(start, min(start + 300, rows))
        table = pa.table({"id": ids, "half": ids / 2})
        pq.write_table(table, directory / f"part-{part}.parquet", row_group_size=row_group_size)
    return str(directory)


# A shard as a whole


def test_a_shard_tells_its_rows_and_those_of_all() -> None:
    second = shard(world_size=3, rank=1)
    assert second.name == "train"
    assert second.total_rows == ROWS
    assert len(second) == second.to_arrow().num_rows == len(second.to_pandas())
    assert second.schema() == TABLE.schema


@pytest.mark.parametrize("as_tables", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_of_files_are_all_rows_in_order(
    tmp_path: Path, world_size: int, as_tables: bool
) -> None:
    data = files(tmp_path / "data")
    for shards in (world_size, 4):
        tables = [
            shard(
                data, world_size=world_size, rank=rank, shards=shards, as_tables=as_tables
            ).to_arrow()
            for rank in range(world_size)
        ]
        ids = pa.concat_tables(tables).column("id").to_pylist()
        assert ids == list(range(1000))


# Batches


@pytest.mark.parametrize("name", ["format", "batch_format"])
@pytest.mark.parametrize("wanted", ["numpy", "pandas", "arrow"])
def test_all_rows_come_in_every_format(name: str, wanted: Any) -> None:
    kinds = {"numpy": dict, "pandas": pd.DataFrame, "arrow": pa.Table}
    batches = list(shard().iter_batches(batch_size=4, **{name: wanted}))
    assert all(isinstance(batch, kinds[wanted]) for batch in batches)
    found = [float(str(number)) for batch in batches for number in batch["number"]]
    assert found == list(range(ROWS))


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_numpy_batches_keep_types_and_shapes(shuffle: Any) -> None:
    batches = list(shard(shuffle=shuffle).iter_batches(batch_size=4))
    assert {batch["number"].dtype for batch in batches} == {np.dtype(np.float32)}
    assert {batch["image"].shape[1:] for batch in batches} == {(2, 3)}
    expected = np.arange(ROWS * 6).reshape(ROWS, 2, 3)
    for batch in batches:
        rows = batch["number"].astype(int)
        np.testing.assert_array_equal(batch["image"], expected[rows])
        assert batch["word"].tolist() == [f"word {row}" for row in rows]


@pytest.mark.parametrize("how", [{}, {"format": "arrow"}, {"prefetch_batches": 2}], ids=str)
def test_batches_made_before_the_loop_are_what_each_epoch_would_make(how: dict[str, Any]) -> None:
    """The orders of the epochs included."""
    data = pa.table({"id": np.arange(20)})
    early, late = shard(data, shuffle=True), shard(data, shuffle=True)
    batches = early.iter_batches(batch_size=6, **how)
    epochs = [numbers(batches) for _ in range(3)]
    assert epochs == [numbers(late.iter_batches(batch_size=6, **how)) for _ in range(3)]
    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(20))] * 3
    assert epochs[0] != epochs[1]
    assert early.cursor.position == late.cursor.position


def test_the_length_of_batches_is_a_whole_epochs() -> None:
    one = shard(pa.table({"id": np.arange(20)}))
    batches = one.iter_batches(batch_size=6)
    lengths = [len(batches), *(len(batches) for _ in batches), len(batches)]
    assert set(lengths) == {4}
    assert len(one.iter_batches(batch_size=6, drop_last=True)) == 3


def test_batches_made_before_the_loop_resume_in_the_middle_of_an_epoch() -> None:
    data = pa.table({"id": np.arange(20)})
    first = shard(data, shuffle=True)
    iterator = iter(first.iter_batches(batch_size=6))
    given = [next(iterator)["id"].tolist() for _ in range(2)]
    resumed = shard(data, shuffle=True, position=first.cursor.position.to_plain())
    batches = resumed.iter_batches(batch_size=6)
    assert len(batches) == 4
    rest, following = numbers(batches), numbers(batches)
    assert sorted(chain(*given, *rest)) == list(range(20))
    assert sorted(chain(*following)) == list(range(20))


def test_an_empty_shard_has_batches_of_the_right_shape() -> None:
    """Two rows for three ranks: the one without rows keeps step with the others."""
    shards = [shard(TABLE.slice(0, 2), world_size=3, rank=rank) for rank in range(3)]
    batches = [list(one.iter_batches(batch_size=8)) for one in shards]
    assert [len(of_rank) for of_rank in batches] == [1, 1, 1]
    assert sorted(len(batch["image"]) for [batch] in batches) == [0, 1, 1]
    assert {batch["image"].shape[1:] for [batch] in batches} == {(2, 3)}


@pytest.mark.parametrize("kind", ["memory", "files read ahead", "files held"])
@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_take_all_rows_in_equally_many_batches(
    tmp_path: Path, kind: str, shuffle: Any, world_size: int
) -> None:
    data = pa.table({"id": np.arange(1000)}) if kind == "memory" else files(tmp_path / "data")
    world = [
        numbers(
            shard(
                data,
                world_size=world_size,
                rank=rank,
                shards=2,
                shuffle=shuffle,
                as_tables=kind == "files held",
            ).iter_batches(global_batch_size=70)
        )
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in world}) == 1
    assert sorted(row for batches in world for batch in batches for row in batch) == list(
        range(1000)
    )


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("source", ["memory", "Parquet", "CSV"])
@pytest.mark.parametrize("shards", [3, 4])
def test_as_many_shards_are_the_same_order_on_any_number_of_workers(
    tmp_path: Path, source: str, shuffle: Any, shards: int
) -> None:
    data: Any = pa.table({"id": np.arange(1000)})
    if source == "CSV":
        pacsv.write_csv(data, tmp_path / "a.csv")
        data = tmp_path / "a.csv"
    elif source == "Parquet":
        data = files(tmp_path / "data")
    alone, *others = (
        global_batches(data, size, shards=shards, shuffle=shuffle) for size in (1, 2, 4, 7)
    )
    assert sorted(chain(*alone)) == list(range(1000))
    assert others == [alone] * 3


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_rows_in_memory_have_the_same_order_on_any_number_of_workers(shuffle: Any) -> None:
    table = pa.table({"id": np.arange(1000)})
    alone, *others = (global_batches(table, size, shuffle=shuffle) for size in (1, 2, 4))
    assert others == [alone] * 2


@pytest.mark.parametrize(
    ("source", "shuffle"),
    [
        *((source, True) for source in ("Parquet", "IPC", "CSV", "JSON Lines")),
        ("CSV", "window"),
        ("JSON Lines", "window"),
    ],
)
def test_shuffled_files_have_the_same_order_on_1_2_4_and_8_workers_by_default(
    tmp_path: Path, source: str, shuffle: Any
) -> None:
    data: Any = files(tmp_path / "data")
    table = pa.table({"id": np.arange(1000)})
    if source == "CSV":
        pacsv.write_csv(table, data := tmp_path / "a.csv")
    elif source == "IPC":
        feather.write_feather(table, str(data := tmp_path / "a.arrow"), chunksize=64)
    elif source == "JSON Lines":
        data = tmp_path / "a.jsonl"
        data.write_text("".join(f'{{"id": {row}}}\n' for row in range(1000)))
    alone, *others = (global_batches(data, size, shuffle=shuffle) for size in (1, 2, 4, 8))
    assert sorted(chain(*alone)) == list(range(1000))
    assert max(alone[0]) > 500, "rows of the whole data set"
    assert others == [alone] * 3


def test_without_shuffling_one_worker_has_the_order_of_the_files(tmp_path: Path) -> None:
    pacsv.write_csv(pa.table({"id": np.arange(1000)}), tmp_path / "a.csv")
    for data in (tmp_path / "a.csv", files(tmp_path / "data")):
        batches = numbers(shard(data).iter_batches(batch_size=90))
        assert [*chain(*batches)] == list(range(1000))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 16])
def test_by_default_no_worker_holds_rows_that_it_does_not_use(
    tmp_path: Path, world_size: int
) -> None:
    data = files(tmp_path / "data")
    spec = spec_of(data, world_size, shuffle=True)
    assert spec.plan.shards == (8 if world_size in (1, 2, 4, 8) else world_size)
    reaches = [spec.held_rows(world_size, rank) for rank in range(world_size)]
    assert [*chain(*reaches)] == list(range(1000))


def spec_of(
    data: Any, world_size: int, cut: int | None = None, window: int | None = None, **config: Any
) -> ShardSpec:
    dataset = RunDataset(source=describe("train", data), config=DataConfig(**config))
    return dataset.spec(
        world_size=world_size,
        whole=False,
        as_tables=False,
        only_tables=False,
        shards=cut,
        window=window,
    )


def test_a_run_that_resumes_keeps_its_order_unless_the_user_says_otherwise(
    tmp_path: Path,
) -> None:
    data = files(tmp_path / "data")
    assert spec_of(data, 4).plan.shards == 4
    assert spec_of(data, 4, cut=2).plan.shards == 2
    assert spec_of(data, 4, cut=2, shards=8).plan.shards == 8
    for cut in ({"shards": 8}, {"cut": 8}):
        assert spec_of(pa.table({"id": [1, 2]}), 1, **cut).plan.shards == 2, "none is empty"
    assert spec_of(data, 4, window=70).plan.window == 70
    assert spec_of(data, 4, window=70, window_rows=90).plan.window == 90


def test_a_position_belongs_to_the_same_data(tmp_path: Path) -> None:
    source = describe("train", files(tmp_path / "data"))
    others = describe("train", {"id": [1, 2]})
    dataset = RunDataset(source=source, digests=digests(source))
    assert dataset.is_same({"digests": digests(source)})
    assert not dataset.is_same({"digests": digests(others)})


def test_what_a_worker_reads_beside_its_part_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = files(tmp_path / "data")
    table = pa.table({"id": np.arange(1000)})
    fine = [spec_of(data, 4), spec_of(data, 4, shards=8), spec_of(table, 4, cut=1)]
    warn_of_read_amplification(fine, 4)
    assert caplog.messages == []
    warn_of_read_amplification([spec_of(data, 4, cut=1)], 4)
    [message] = caplog.messages
    assert "up to 4.0 times its part of the data set 'train'" in message
    assert "DataConfig(shards=4)" in message


def test_files_of_few_rows_share_a_window(tmp_path: Path) -> None:
    for part in range(30):
        pq.write_table(pa.table({"id": np.arange(4) + 4 * part}), tmp_path / f"{part:02}.parquet")
    assert spec_of(tmp_path, 1, shuffle="window").plan.window == 8192
    [batch] = numbers(shard(tmp_path, shuffle="window").iter_batches(batch_size=120))
    assert sorted(batch) == list(range(120))
    assert any(abs(one - other) > 4 for one, other in pairwise(batch))


def test_rows_that_are_large_keep_windows_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.bytes(1 << 20) for _ in range(4)]
    for part, image in enumerate(images):
        pq.write_table(pa.table({"image": [image], "id": [part]}), tmp_path / f"{part}.parquet")
    assert 16 <= spec_of(tmp_path, 1, shuffle="window").plan.window <= 32, "32 MiB of 1 MiB each"


def test_strings_are_converted_when_they_are_wanted() -> None:
    one = shard(pa.table({"id": range(300_000), "word": [f"{n}" for n in range(300_000)]}))
    tracemalloc.start()
    batches = iter(one.iter_batches(batch_size=100))
    first = next(batches)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first["word"].tolist() == [f"{n}" for n in range(100)]
    assert most < 2e6, "all of them would take 20 MB"
    words = [word for batch in batches for word in batch["word"]]
    assert words == [f"{n}" for n in range(100, 300_000)]


@pytest.mark.parametrize("batch_size", [7, 9000])
def test_columns_in_many_chunks_are_read_across_them(batch_size: int) -> None:
    tables = [
        pa.table({"word": [f"{n}", None], "flag": [True, None], "list": [[n], [n, n]], "x": [n, 0]})
        for n in range(5000)
    ]
    expected = pa.concat_tables(tables).to_pydict()
    batches = list(shard(pa.concat_tables(tables)).iter_batches(batch_size=batch_size))
    for name in ("word", "flag", "x"):
        assert [value for batch in batches for value in batch[name]] == expected[name]
    assert [row.tolist() for batch in batches for row in batch["list"]] == expected["list"]


def test_few_threads_read_ahead_however_many_shards_a_worker_has(tmp_path: Path) -> None:
    batches = iter(shard(files(tmp_path / "data"), shards=64).iter_batches(batch_size=64))
    first = next(batches)
    reading = [each for each in threading.enumerate() if each.name.startswith("polytrain-read")]
    assert 1 <= len(reading) <= 4
    assert sum(len(batch["id"]) for batch in chain([first], batches)) == 1000
    assert not any(each.is_alive() for each in reading)


@pytest.mark.parametrize("prefetched", [0, 3])
def test_an_iterator_that_was_left_may_be_collected_while_a_thread_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetched: int
) -> None:
    one = shard(files(tmp_path / "data"), shards=64)
    batches = iter(one.iter_batches(batch_size=64, prefetch_batches=prefetched))
    next(batches)
    names = {each.name.partition("_")[0] for each in threading.enumerate()}
    assert ({"polytrain-read", "polytrain-prefetch"} if prefetched else {"polytrain-read"}) <= names
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, cycle
    collect_while_a_thread_starts(monkeypatch)
    assert sum(len(batch["id"]) for batch in one.iter_batches(batch_size=64)) == 1000


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (3, 4), (4, 3)])
def test_iteration_goes_on_at_exactly_that_row_on_another_number_of_workers(
    tmp_path: Path, shuffle: Any, kind: str, sizes: tuple[int, int]
) -> None:
    data = pa.table({"id": np.arange(1000)}) if kind == "memory" else files(tmp_path / "data")
    before, after = sizes

    def world(size: int, position: Any = None) -> list[RowsShard]:
        return [
            shard(
                data,
                world_size=size,
                rank=rank,
                shards=before,
                shuffle=shuffle,
                position=position,
            )
            for rank in range(size)
        ]

    uninterrupted = [
        sorted(chain(*batch))
        for batch in zip(
            *(numbers(one.iter_batches(global_batch_size=90)) for one in world(before)),
            strict=True,
        )
    ]
    first = world(before)
    iterators = [iter(one.iter_batches(global_batch_size=90)) for one in first]
    for _ in range(4):
        for iterator in iterators:
            next(iterator)
    recorded = first[0].cursor.position.to_plain()
    assert all(one.cursor.position == first[0].cursor.position for one in first)
    resumed = [
        sorted(chain(*batch))
        for batch in zip(
            *(numbers(one.iter_batches(global_batch_size=90)) for one in world(after, recorded)),
            strict=True,
        )
    ]
    assert resumed == uninterrupted[4:]


def test_batches_that_were_prepared_ahead_do_not_count_as_given() -> None:
    data = pa.table({"id": np.arange(1000)})
    one = shard(data)
    batches = iter(one.iter_batches(batch_size=10, prefetch_batches=8))
    for _ in range(3):
        next(batches)
    assert one.cursor.position.start == 30


def test_an_epoch_is_over_when_its_last_batch_is_used() -> None:
    """Though nobody has asked whether there is another: a checkpoint may be made then."""
    one = shard(pa.table({"id": np.arange(20)}))
    batches = one.iter_ahead(batch_size=10)
    for _ in range(2):
        next(batches)
        batches.used()
    assert (one.cursor.position.epoch, one.cursor.position.start) == (1, 0)


def test_an_epoch_of_which_nothing_is_left_is_over_at_once() -> None:
    one = shard(pa.table({"id": np.arange(20)}))
    one.cursor.next_epoch().given(20)
    resumed = shard(pa.table({"id": np.arange(20)}), position=one.cursor.position.to_plain())
    assert [len([*resumed.iter_ahead(batch_size=10)]) for _ in range(2)] == [0, 2]


def test_prefetched_batches_are_the_same_ones() -> None:
    data = pa.table({"id": np.arange(1000)})
    plain, ahead = (
        numbers(shard(data, shuffle=True).iter_batches(batch_size=64, prefetch_batches=count))
        for count in (0, 3)
    )
    assert plain == ahead


def test_leaving_a_prefetching_loop_ends_its_thread() -> None:
    one = shard(pa.table({"id": np.arange(1000)}))
    batches = iter(one.iter_batches(batch_size=1, prefetch_batches=4))
    next(batches)
    [thread] = [each for each in threading.enumerate() if each.name == "polytrain-prefetch"]
    batches.close()  # type: ignore[attr-defined]  # a for loop that is left closes it
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_shard_can_be_pickled_and_copied_after_a_prefetching_loop() -> None:
    """As by a DataLoader whose worker processes aren't forked."""
    one = shard(pa.table({"id": np.arange(10)}))
    read = numbers(one.iter_batches(batch_size=5, prefetch_batches=1))
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert numbers(copied.iter_batches(batch_size=5)) == read


def test_the_next_loop_waits_until_nothing_is_prepared_for_the_one_that_was_left() -> None:
    """What prepares batches, or the device that it uses, may not be meant for two threads."""
    at_second, goes_on = threading.Event(), threading.Event()
    firsts: list[int] = []

    def prepare(batch: Any) -> Any:
        first = int(batch["id"][0])
        if first == 10 and not goes_on.is_set():
            at_second.set()
            assert goes_on.wait(timeout=60)
        firsts.append(first)
        return batch

    one = shard(pa.table({"id": np.arange(1000)}))
    ready = one.iter_batches(batch_size=10, prefetch_batches=4, convert=prepare)
    batches = iter(ready)
    next(batches)
    assert at_second.wait(timeout=60)
    batches.close()  # type: ignore[attr-defined]  # it is a generator, which a loop closes
    loop = threading.Thread(target=lambda: next(iter(ready)), daemon=True)
    loop.start()
    goes_on.set()
    loop.join(timeout=60)
    assert firsts[:3] == [0, 10, 0]


def test_an_error_while_preparing_is_raised_where_the_batch_is_missed() -> None:
    def fail_later(batch: Any) -> Any:
        if batch["id"][0] >= 20:
            raise RuntimeError("no more")
        return batch

    one = shard(pa.table({"id": np.arange(1000)}))
    batches = iter(one.iter_batches(batch_size=10, prefetch_batches=4, convert=fail_later))
    assert [int(next(batches)["id"][0]) for _ in range(2)] == [0, 10]
    with pytest.raises(RuntimeError, match="no more"):
        next(batches)


def test_the_gradient_weight_makes_the_mean_of_means_the_mean() -> None:
    """Canonical shards of 4, 4 and 3 rows on 2 workers: the shares differ."""
    data = pa.table({"id": np.arange(11)})
    world = [shard(data, world_size=2, rank=rank, shards=3) for rank in range(2)]
    batches = [iter(one.iter_batches(global_batch_size=11)) for one in world]
    [(ours, mine), (theirs, yours)] = [
        (float(np.mean(next(of_rank)["id"])), one.gradient_weight)
        for one, of_rank in zip(world, batches, strict=True)
    ]
    assert mine != yours
    assert (ours * mine + theirs * yours) / 2 == pytest.approx(np.mean(np.arange(11)))


# The remainder


@given(rows=st.integers(1, 200), world_size=st.integers(1, 4), batch_size=st.integers(1, 40))
@example(rows=14, world_size=2, batch_size=2)
@example(rows=13, world_size=2, batch_size=2)
@example(rows=1, world_size=4, batch_size=1)
def test_ranks_together_have_the_batches_and_means_of_one_process(
    rows: int, world_size: int, batch_size: int
) -> None:
    data = pa.table({"id": np.arange(rows)})
    world = [shard(data, world_size=world_size, rank=rank) for rank in range(world_size)]
    batches = [
        [
            (batch["id"], one.gradient_weight)
            for batch in one.iter_batches(batch_size=batch_size, allow_empty=True)
        ]
        for one in world
    ]
    expected = np.split(
        np.arange(rows), range(batch_size * world_size, rows, batch_size * world_size)
    )
    for step, whole in zip(zip(*batches, strict=True), expected, strict=True):
        parts = [ids for ids, _ in step]
        assert sorted(np.concatenate(parts)) == [*whole]
        # A rank without a row has a mean of nothing, which counts nothing.
        means = [weight * ids.mean() if weight else 0 for ids, weight in step]
        assert sum(means) / world_size == pytest.approx(whole.mean())
        if len(whole) == batch_size * world_size:
            assert {(len(ids), weight) for ids, weight in step} == {(batch_size, 1)}


@given(rows=st.integers(1, 60), world_size=st.integers(1, 5), batch_size=st.integers(1, 20))
def test_every_row_comes_once_in_equally_many_batches(
    rows: int, world_size: int, batch_size: int
) -> None:
    data = pa.table({"id": np.arange(rows)})
    world = [
        numbers(shard(data, world_size=world_size, rank=rank).iter_batches(batch_size=batch_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in world}) == 1
    assert sorted(row for batches in world for batch in batches for row in batch) == list(
        range(rows)
    )
    assert max(len(batch) for batches in world for batch in batches) <= batch_size


@given(rows=st.integers(1, 60), world_size=st.integers(1, 5), batch_size=st.integers(2, 20))
def test_no_step_leaves_a_worker_without_a_row(rows: int, world_size: int, batch_size: int) -> None:
    assume(rows >= world_size)
    data = pa.table({"id": np.arange(rows)})
    for rank in range(world_size):
        one = shard(data, world_size=world_size, rank=rank)
        assert all(numbers(one.iter_batches(batch_size=batch_size)))


@given(rows=st.integers(1, 60), world_size=st.integers(1, 5), batch_size=st.integers(1, 20))
def test_only_the_last_step_leaves_a_worker_without_a_row(
    rows: int, world_size: int, batch_size: int
) -> None:
    data = pa.table({"id": np.arange(rows)})
    world = [
        numbers(shard(data, world_size=world_size, rank=rank).iter_batches(batch_size=batch_size))
        for rank in range(world_size)
    ]
    assert all(batch for batches in world for batch in batches[:-1])


@pytest.mark.parametrize("kind", ["memory", "files read ahead", "files held"])
@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_padding_with_fewer_rows_than_workers(
    tmp_path: Path, kind: str, shuffle: Any, rows: int, batch_size: int
) -> None:
    data: Any = pa.table({"id": np.arange(rows)})
    if kind != "memory":
        data = files(tmp_path / "data", rows=rows, row_group_size=1)
    world = [
        numbers(
            shard(
                data,
                world_size=4,
                rank=rank,
                remainder="pad",
                shuffle=shuffle,
                as_tables=kind == "files held",
            ).iter_batches(batch_size=batch_size)
        )
        for rank in range(4)
    ]
    assert {len(batch) for batches in world for batch in batches} == {batch_size}
    assert {row for batches in world for batch in batches for row in batch} == set(range(rows))


@pytest.mark.parametrize("how", ["the data set's policy", "drop_last"])
def test_dropped_rows_are_counted(how: str, caplog: pytest.LogCaptureFixture) -> None:
    remainder = "drop" if how != "drop_last" else "keep"
    one = shard(remainder=remainder)
    with caplog.at_level(logging.WARNING):
        sizes = [
            len(batch["number"])
            for _ in range(2)
            for batch in one.iter_batches(batch_size=4, drop_last=how == "drop_last")
        ]
    assert sizes == [4, 4, 4, 4]
    assert one.num_batches(batch_size=4, drop_last=how == "drop_last") == 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "'train' leaves out 3 of 11 rows" in messages[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_padding_fills_the_last_batch(rank: int) -> None:
    one = shard(world_size=2, rank=rank, remainder="pad")
    assert [len(batch["number"]) for batch in one.iter_batches(batch_size=4)] == [4, 4]
    assert one.num_batches(batch_size=4) == 2


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_padding_of_files_begins_at_the_start_again(tmp_path: Path, shuffle: Any) -> None:
    data = files(tmp_path / "data")
    world = [
        shard(data, world_size=2, rank=rank, remainder="pad", shuffle=shuffle) for rank in range(2)
    ]
    batches = [numbers(one.iter_batches(batch_size=150)) for one in world]
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == [[150] * 4] * 2
    assert {row for of_rank in batches for batch in of_rank for row in batch} == set(range(1000))


# Groups


def grouped(sizes: list[int]) -> pa.Table:
    query = np.repeat(np.arange(len(sizes)), sizes)
    return pa.table({"query": query, "id": np.arange(len(query))})


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    world_size=st.integers(1, 5),
    shuffle=st.sampled_from([False, True, "window"]),
    batch_size=st.integers(1, 4),
)
def test_no_group_is_divided(
    sizes: list[int], world_size: int, shuffle: Any, batch_size: int
) -> None:
    source = describe("train", grouped(sizes))
    dataset = RunDataset(
        source=source,
        config=DataConfig(shuffle=shuffle, window_rows=3),
        group_starts=group_starts(source, "query"),
    )
    spec = dataset.spec(world_size=world_size, whole=False, as_tables=False, only_tables=False)
    table = dataset.held_rows(spec, world_size, 0).read()
    seen: list[int] = []
    whole: list[int] = []
    for rank in range(world_size):
        one = open_shards([spec], iter([table]), {}, world_size=world_size, rank=rank)["train"]
        whole += one.to_arrow().column("id").to_pylist()
        for batch in one.iter_batches(batch_size=batch_size):
            seen += batch["id"].tolist()
            for query in set(batch["query"].tolist()):
                assert (batch["query"] == query).sum() == sizes[query], "a group was divided"
            assert len(set(batch["query"].tolist())) <= batch_size
    assert sorted(seen) == whole == list(range(sum(sizes)))


@pytest.mark.parametrize(("window_rows", "groups"), [(200, 20), (50, 5), (3, 1)])
def test_a_window_of_groups_has_as_many_rows_as_one_of_rows(
    tmp_path: Path, window_rows: int, groups: int
) -> None:
    pq.write_table(grouped([10] * 100), tmp_path / "a.parquet", row_group_size=200)
    source = describe("train", tmp_path)
    dataset = RunDataset(
        source=source,
        config=DataConfig(shuffle="window", window_rows=window_rows),
        group_starts=group_starts(source, "query"),
    )
    spec = dataset.spec(world_size=1, whole=False, as_tables=False, only_tables=False)
    order = spec.plan.epoch(0).of_shard(0)
    assert {len(window.region) for window in order.select(range(len(order)))} == {groups}


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    world_size=st.integers(1, 5),
    shards=st.integers(1, 5),
    shuffle=st.sampled_from([False, True, "window"]),
    batch_size=st.integers(1, 4),
    remainder=st.sampled_from(["keep", "pad", "drop"]),
)
def test_the_gradient_weight_counts_the_rows_of_groups(
    sizes: list[int],
    world_size: int,
    shards: int,
    shuffle: Any,
    batch_size: int,
    remainder: Any,
) -> None:
    source = describe("train", grouped(sizes))
    dataset = RunDataset(
        source=source,
        config=DataConfig(shuffle=shuffle, window_rows=3, remainder=remainder),
        group_starts=group_starts(source, "query"),
    )
    spec = dataset.spec(
        world_size=world_size, whole=False, as_tables=False, only_tables=False, shards=shards
    )
    table = dataset.held_rows(spec, world_size, 0).read()
    world = [
        open_shards([spec], iter([table]), {}, world_size=world_size, rank=rank)["train"]
        for rank in range(world_size)
    ]
    of_ranks = [
        [
            (len(batch["id"]), one.gradient_weight)
            for batch in one.iter_batches(batch_size=batch_size)
        ]
        for one in world
    ]
    for step in zip(*of_ranks, strict=True):
        rows = sum(count for count, _ in step)
        assert [weight for _, weight in step] == pytest.approx(
            [count * world_size / rows for count, _ in step]
        )


# Arguments


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    table = pa.table({"id": np.arange(6)})
    sizes = {"batch_size": np.int64(2), "global_batch_size": np.uint8(2)}
    for name, size in sizes.items():
        batches = shard(table).iter_batches(**{name: size}, prefetch_batches=np.int32(1))
        assert numbers(batches) == [[0, 1], [2, 3], [4, 5]]
    of_numpy: Any = np.int64(3)
    one = shard(table, shuffle="window", seed=of_numpy, window_rows=np.int16(2))
    other = shard(table, shuffle="window", seed=3, window_rows=2)
    assert numbers(one.iter_batches()) == numbers(other.iter_batches())
    position = json.dumps(one.cursor.position.to_plain())
    assert position == json.dumps(other.cursor.position.to_plain())
    scaling = ScalingConfig(num_workers=(np.int64(1), np.int64(2)), standby=of_numpy)
    assert (scaling.min_workers, scaling.max_workers, scaling.standby) == (1, 2, 3)
    assert [*config_problems(scaling, RunConfig())] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"prefetch_batches": 1.5}, "prefetch_batches=1.5"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"batch_size": 2, "global_batch_size": 4}, "give one of them"),
        ({"batch_format": "torch"}, "batch_format='torch'.*numpy.*pandas.*arrow"),
        ({"format": "torch"}, "^format='torch'"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shard().iter_batches(**arguments)


def test_memory_stays_at_a_few_row_groups(tmp_path: Path) -> None:
    """Of 667: the one that is in use, the one that is read ahead, and what is made of them."""
    data = files(tmp_path / "data", rows=200_000, row_group_size=300)
    one = shard(data, shuffle="window", window_rows=300)
    row_group = 300 * 2 * 8
    before = most = pa.total_allocated_bytes()
    for _ in one.iter_batches(batch_size=100, batch_format="arrow"):
        most = max(most, pa.total_allocated_bytes())
    assert most - before < 6 * row_group


def test_virtual_workers_dont_divide_a_shard_of_all_rows() -> None:
    ids = np.arange(6)
    shard = shard_of({"id": ids}, world_size=2, rank=1, virtual_workers=4, whole=True)
    batches = [batch["id"].tolist() for batch in shard.iter_batches(batch_size=4)]
    assert batches == [[0, 1, 2, 3], [4, 5]]
