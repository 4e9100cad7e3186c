"""Batches as tensors: their types, their memory, and the structure that they come in."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.shards import shard_of
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from polytrain_torch import PreparedDataLoader, TorchShard, prepare_model

Pair = namedtuple("Pair", "features label")  # what data sets like to return


def shard(**columns: Any) -> TorchShard:
    return TorchShard(shard_of(columns))


ROWS = 5
COLUMNS = {
    "x": np.arange(ROWS, dtype=np.float64),
    "n": np.arange(ROWS, dtype=np.int32),
    "image": np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3),
}


def test_columns_become_tensors_of_their_type_and_shape() -> None:
    batches = list(shard(**COLUMNS).iter_torch_batches(batch_size=2))
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1]
    types = {name: tensor.dtype for name, tensor in batches[0].items()}
    assert types == {"x": torch.float64, "n": torch.int32, "image": torch.float32}
    images = torch.cat([batch["image"] for batch in batches])
    assert images.tolist() == COLUMNS["image"].tolist()


def test_batches_made_before_the_loop_over_epochs_are_an_epoch_in_each() -> None:
    """As in the scripts that Ray Train's documentation shows."""
    loader = shard(**COLUMNS).iter_torch_batches(batch_size=2)
    epochs = [torch.cat([batch["n"] for batch in loader]).tolist() for _ in range(3)]
    assert epochs == [list(range(ROWS))] * 3
    assert len(loader) == 3


def test_one_type_for_all_or_one_for_each() -> None:
    [batch] = shard(**COLUMNS).iter_torch_batches(dtypes=torch.float16)
    assert {tensor.dtype for tensor in batch.values()} == {torch.float16}
    [batch] = shard(**COLUMNS).iter_torch_batches(dtypes={"n": torch.int64})
    assert batch["n"].dtype == torch.int64
    assert batch["x"].dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "dtype", "what"),
    [
        (np.array([1, 300]), torch.int8, "300, and the type asked for ends at -128 and 127"),
        (np.array([-1, 1]), torch.uint8, "-1, and"),
        (np.array([0.5, 1e30], np.float32), torch.int64, "1.0+[0-9]*e\\+30, and"),
        (np.array([2.0**63]), torch.int64, "9.22.*e\\+18, and"),
        (np.array([np.nan, 1.0]), torch.int64, "a missing value or NaN"),
        (pa.array([1, None]), torch.int64, "a missing value or NaN"),
    ],
)
def test_a_type_that_would_change_values_is_refused(
    values: Any, dtype: torch.dtype, what: str
) -> None:
    for dtypes in (dtype, {"x": dtype}):
        batches = shard(x=values).iter_torch_batches(dtypes=dtypes)
        with pytest.raises(ValueError, match=f"'x' has {what}"):
            list(batches)


def test_a_type_with_room_for_all_values_is_given() -> None:
    [batch] = shard(x=np.array([-128, 127])).iter_torch_batches(dtypes=torch.int8)
    assert batch["x"].tolist() == [-128, 127]
    [batch] = shard(x=np.array([0.0, 255.0])).iter_torch_batches(dtypes=torch.uint8)
    assert batch["x"].tolist() == [0, 255]
    [batch] = shard(x=np.array([0.0, np.nan])).iter_torch_batches(dtypes=torch.float16)
    assert batch["x"].isnan().tolist() == [False, True]


def test_types_of_columns_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'images', which isn't there\. .*'image'"):
        shard(**COLUMNS).iter_torch_batches(dtypes={"images": torch.float16})


def test_booleans_become_tensors() -> None:
    [batch] = shard(mask=np.array([True, False])).iter_torch_batches()
    assert batch["mask"].tolist() == [True, False]
    assert batch["mask"].dtype == torch.bool


def test_tensors_may_be_written_to() -> None:
    """The rows lie in memory that the next epoch, and the next attempt, read again."""
    train = shard(**COLUMNS)
    for batch in train.iter_torch_batches():
        batch["x"].zero_()
    assert train.to_arrow().column("x").to_pylist() == COLUMNS["x"].tolist()


LISTS = {"tokens": pa.array([[n, n + 1, n + 2] for n in range(ROWS)])}
RAGGED = {"tokens": pa.array([[1] * (n + 1) for n in range(ROWS)])}


def test_lists_of_one_length_become_a_tensor() -> None:
    batches = list(shard(**LISTS).iter_torch_batches(batch_size=2))
    assert torch.cat([batch["tokens"] for batch in batches]).tolist() == [
        [n, n + 1, n + 2] for n in range(ROWS)
    ]
    [batch] = shard(**LISTS).iter_torch_batches(dtypes=torch.float32)
    assert batch["tokens"].dtype == torch.float32


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_lists_of_different_lengths_are_refused_with_the_remedy(batch_size: int) -> None:
    """Whether there are two lengths in one batch, or in one batch and the next."""
    match = "'tokens' of the data set 'train' .*length 1, another length 2.*collate_fn="
    with pytest.raises(TypeError, match=match):
        list(shard(**RAGGED).iter_torch_batches(batch_size=batch_size))


def test_a_collate_fn_makes_the_batch() -> None:
    def padded(batch: dict[str, Any]) -> Any:
        rows = [torch.from_numpy(row) for row in batch["tokens"]]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), batch["n"]

    data = shard(**RAGGED, n=COLUMNS["n"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, if an array can't be written to
        batches = list(data.iter_torch_batches(batch_size=3, collate_fn=padded))
    assert [tuple(tokens.shape) for tokens, _ in batches] == [(3, 3), (2, 5)]
    assert [n.tolist() for _, n in batches] == [[0, 1, 2], [3, 4]]


def test_what_a_collate_fn_makes_goes_to_the_device() -> None:
    made = shard(**COLUMNS).iter_torch_batches(
        collate_fn=lambda batch: {"n": [torch.from_numpy(batch["n"])]}, device="meta"
    )
    [batch] = made
    assert batch["n"][0].device.type == "meta"


def test_types_are_the_collate_fn_s_to_choose() -> None:
    with pytest.raises(ValueError, match=r"dtypes=torch\.float32: .* with collate_fn"):
        shard(**COLUMNS).iter_torch_batches(collate_fn=dict, dtypes=torch.float32)


def test_a_column_of_words_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"'word'.* Encode it as numbers"):
        list(shard(word=["a", "b"]).iter_torch_batches())


def test_a_torch_shard_is_a_shard() -> None:
    train = shard(**COLUMNS)
    assert (train.name, len(train), train.total_rows) == ("train", ROWS, ROWS)
    assert isinstance(train.to_arrow(), pa.Table)
    assert train.schema().names == list(train.to_pandas().columns) == ["x", "n", "image"]
    batches = list(train.iter_batches(batch_size=2, batch_format="arrow", drop_last=True))
    assert [batch.num_rows for batch in batches] == [2, 2]


def test_batches_move_in_the_structure_that_they_come_in() -> None:
    batch = {
        "pair": Pair(torch.ones(1), torch.zeros(1)),
        "list": [torch.ones(1), (torch.ones(2), "name")],
        "number": 3,
        "words": BatchEncoding({"ids": torch.ones(1)}),
    }
    moved = moved_to_meta(batch)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].label.device.type == "meta"
    assert type(moved["list"]) is list
    tensor, name = moved["list"][1]
    assert (tensor.device.type, name, moved["number"]) == ("meta", "name", 3)
    assert moved["words"].ids.device.type == "meta"


def moved_to_meta(batch: Any) -> Any:
    loader = DataLoader([0], batch_size=None, collate_fn=lambda _: batch)
    [moved] = PreparedDataLoader(loader, device=torch.device("meta"))
    return moved


@pytest.mark.parametrize(
    "batch",
    [
        OrderedDict(x=torch.ones(1), pair=Pair(torch.ones(1), 2)),
        defaultdict(list, x=torch.ones(1)),
        UserDict(x=torch.ones(1)),
        MappingProxyType({"x": torch.ones(1)}),
    ],
)
def test_mappings_keep_their_type(batch: Any) -> None:
    moved = moved_to_meta(batch)
    assert type(moved) is type(batch)
    assert [*moved] == [*batch]
    assert moved["x"].device.type == "meta"
    assert batch["x"].device.type == "cpu"


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shards": 2}, {"as_tables": True}])
def test_a_worker_without_a_row_in_the_last_step_has_a_loss(
    rank: int, rows: int, options: dict[str, Any]
) -> None:
    """Otherwise it is the mean of nothing, and rank 0 reports NaN."""
    data = {"x": np.arange(rows, dtype=float)}
    for trains in (True, False):
        mine = TorchShard(shard_of(data, world_size=4, rank=rank, **options))
        with torch.set_grad_enabled(trains):
            losses = [
                (batch["x"].add(1).mean() * mine.gradient_weight).item()
                for batch in mine.iter_torch_batches(batch_size=1)
            ]
        assert len(losses) == -(-rows // 4)
        assert np.isfinite(losses).all()
        assert (losses[-1] == 0) == (mine.gradient_weight == 0)


def test_without_a_device_batches_stay_where_they_are() -> None:
    [batch] = PreparedDataLoader(DataLoader(torch.arange(3), batch_size=3), device=None)
    assert batch.device.type == "cpu"


def test_everything_else_is_the_loaders() -> None:
    prepared = PreparedDataLoader(DataLoader(torch.arange(6), batch_size=4), device=None)
    assert len(prepared) == 2
    assert prepared.batch_size == 4
    assert prepared.dataset.tolist() == list(range(6))
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = prepared.no_such_thing


def test_a_prepared_loader_can_be_copied() -> None:
    prepared = PreparedDataLoader(DataLoader(torch.arange(6), batch_size=4), device=None)
    assert len(copy.copy(prepared)) == 2


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel_strategy='zero'"):
        prepare_model(torch.nn.Linear(1, 1), parallel_strategy="zero")


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model: .*meta device.*to_empty"):
        prepare_model(torch.nn.Linear(1, 1, device="meta"))


def test_texts_are_named_before_the_first_batch() -> None:
    texts = shard(**COLUMNS, name=["a"] * ROWS, kind=pa.array(["b"] * ROWS).dictionary_encode())
    with pytest.raises(TypeError, match=r"'name', 'kind': texts can't become a tensor"):
        texts.iter_torch_batches(batch_size=2)
    [batch] = texts.iter_torch_batches(collate_fn=lambda batch: list(batch["name"]))
    assert batch == ["a"] * ROWS


class _Base:
    """As Ray Data's classes: an object that is called with a batch."""

    def __call__(self, batch: Any) -> Any:
        return type(batch).__module__.partition(".")[0], len(batch)


class ArrowBatchCollateFn(_Base): ...


class PandasBatchCollateFn(_Base): ...


@pytest.mark.parametrize(
    ("cls", "package"), [(ArrowBatchCollateFn, "pyarrow"), (PandasBatchCollateFn, "pandas")]
)
def test_a_collate_class_gets_its_format(cls: Any, package: str) -> None:
    given = type("Own", (cls,), {})()
    batches = shard(**COLUMNS).iter_torch_batches(batch_size=2, collate_fn=given)
    assert list(batches) == [(package, 2), (package, 2), (package, 1)]


@pytest.mark.parametrize("name", ["local_shuffle_buffer_size", "local_shuffle_seed"])
def test_a_local_shuffle_is_refused(name: str) -> None:
    for method in (shard(**COLUMNS).iter_torch_batches, shard(**COLUMNS).iter_batches):
        with pytest.raises(ValueError, match=rf"{name}=7: .*DataConfig\(shuffle="):
            method(**{name: 7})
        assert len(list(method(**{name: None}))) == 1


def test_rows_one_by_one() -> None:
    rows = list(shard(**COLUMNS).iter_rows())
    assert [(row["x"], row["n"]) for row in rows] == [(float(n), n) for n in range(ROWS)]
    assert {type(row["n"]) for row in rows} == {int}
    assert rows[1]["image"].tolist() == COLUMNS["image"][1].tolist()


def test_a_shard_is_counted_and_materialized() -> None:
    one = shard(**COLUMNS)
    assert one.count() == ROWS
    assert len(one.materialize().to_pandas()) == ROWS  # type: ignore[arg-type]  # a data frame


@pytest.mark.parametrize("batch_format", ["default", None])
def test_the_default_format_is_numpy(batch_format: Any) -> None:
    [batch] = shard(x=COLUMNS["x"]).iter_batches(batch_format=batch_format)
    assert isinstance(batch["x"], np.ndarray)


def test_pinned_memory_may_be_wanted() -> None:
    [batch] = shard(x=COLUMNS["x"]).iter_torch_batches(pin_memory=True)
    assert batch["x"].tolist() == list(range(ROWS))
