"""Sequences of tokens in rows of one length."""

from __future__ import annotations

from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.problems import FindProblems
from tests.shards import shard_of

from polytrain import DataConfig, Mix
from polytrain.data.read.packing import POSITIONS, packed
from polytrain.data.read.pieces import Pieces, TablePiece

SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.large_list(pa.int64())})


def pieces_of(lengths: list[list[int]]) -> Pieces:
    """Pieces with lists of these lengths, whose numbers count on."""
    total = iter(range(10**6))
    tables = []
    for of_piece in lengths:
        lists = [[next(total) for _ in range(length)] for length in of_piece]
        labels = [[-number for number in each] for each in lists]
        tables.append(pa.table({"input_ids": lists, "labels": labels}, schema=SCHEMA))
    return Pieces(schema=SCHEMA, pieces=tuple(map(TablePiece, tables)))


lengths = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=6).filter(
    lambda found: sum(chain(*found)) > 0
)


@given(lengths=lengths, data=st.data())
def test_rows_are_all_tokens_in_order_from_any_place(
    lengths: list[list[int]], data: st.DataObject
) -> None:
    total = sum(chain(*lengths))
    length = data.draw(st.integers(1, total))
    found = packed(pieces_of(lengths), length)
    assert sum(piece.rows for piece in found.pieces) == total // length
    begun = np.repeat([*accumulate(chain(*lengths), initial=0)][:-1], [*chain(*lengths)])
    first = 0
    for piece in found.pieces:
        start = data.draw(st.integers(0, piece.rows))
        stop = data.draw(st.integers(start, piece.rows))
        table = piece.read(start, stop)
        rows = (first + np.arange(start, stop))[:, None] * length + np.arange(length)
        for name, wanted in (
            ("input_ids", rows),
            ("labels", -rows),
            (POSITIONS, rows - np.maximum(begun[rows], rows - rows % length)),
        ):
            read = table.column(name).combine_chunks().to_numpy_ndarray() if len(table) else wanted
            assert np.array_equal(read, wanted)
            assert piece.read(start, stop, [name]).column(name).equals(table.column(name))
        first += piece.rows


TEXTS = [np.arange(start, start + size).tolist() for start, size in ((0, 5), (5, 3), (8, 9))]


def test_a_batch_has_rows_of_one_length() -> None:
    shard = shard_of({"input_ids": TEXTS}, pack=4)
    [batch] = shard.iter_batches(batch_size=10)
    assert batch["input_ids"].tolist() == np.arange(16).reshape(4, 4).tolist()
    assert batch[POSITIONS].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_a_run_on_files_resumes_at_another_size_with_every_token_once(
    shuffle: Any, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    borders = np.cumsum(random.integers(1, 40, 300))
    lists = np.split(np.arange(borders[-1]), borders[:-1])
    for number in range(3):
        table = pa.table(
            {"input_ids": [x.tolist() for x in lists[number * 100 : number * 100 + 100]]}
        )
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=30)
    options: dict[str, Any] = {"shuffle": shuffle, "window_rows": 20, "pack": 16, "shards": 2}

    def rest(world_size: int, position: Any) -> list[int]:
        shards = [
            shard_of(tmp_path, world_size=world_size, rank=rank, position=position, **options)
            for rank in range(world_size)
        ]
        loops = [shard.iter_batches(global_batch_size=32) for shard in shards]
        return [
            int(x) for parts in zip(*loops, strict=True) for p in parts for x in p["input_ids"].flat
        ]

    first = shard_of(tmp_path, **options)
    used: list[int] = []
    loop = iter(first.iter_batches(global_batch_size=32))
    for _ in range(4):
        used += next(loop)["input_ids"].flat
    position = first.cursor.recorded().to_plain()
    kept = borders[-1] // 16 * 16
    for world_size in (1, 2, 3):
        assert sorted(used + rest(world_size, position)) == [*range(kept)]


def test_sources_of_a_mix_are_packed_each_by_itself() -> None:
    sources = {"a": {"input_ids": TEXTS}, "b": {"input_ids": [[100] * 40, [200] * 40]}}
    shard = shard_of(Mix(sources, weights={"a": 1, "b": 1}), pack=8)
    [batch] = shard.iter_batches(batch_size=10)
    assert batch["input_ids"][:, 0].tolist() == [0, 100, 8, 100]


def test_sources_of_a_mix_may_have_tokens_of_different_widths() -> None:
    wide, narrow = (
        pa.table({"ids": pa.array([[1, 2, 3], [4]], pa.list_(kind))})
        for kind in (pa.int64(), pa.int32())
    )
    mix = Mix({"wide": wide, "narrow": narrow}, weights={"wide": 1, "narrow": 1})
    [batch] = shard_of(mix, pack=2).iter_batches(batch_size=4)
    assert batch["ids"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_a_transform_makes_the_tokens() -> None:
    def encoded(batch: dict[str, Any]) -> dict[str, Any]:
        lists = np.empty(len(batch["text"]), object)
        lists[:] = [np.frombuffer(text.encode(), np.uint8) for text in batch["text"]]
        return {"input_ids": lists}

    shard = shard_of({"text": ["abc", "d", "efgh"]}, pack=4, transform=encoded)
    [batch] = shard.iter_batches(batch_size=10)
    assert batch["input_ids"].tobytes() == b"abcdefgh"


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"x": [1, 2]}, "the column 'x' is int64"),
        ({"x": ["a", "b"]}, "the column 'x' is string"),
        ({"x": [[0.5], [1.5, 2.5]]}, "the column 'x' is list<item: double>"),
        ({"x": [[1, 2], [3]], POSITIONS: [[1, 2], [3]]}, "which is there already"),
        ({"x": [[1, 2, 3], None]}, "the column 'x' lacks lists, or numbers in them"),
        ({"x": [[1, 2], None, [3, 4]]}, "the column 'x' lacks lists, or numbers in them"),
        ({"x": [[1, None], [2]]}, "the column 'x' lacks lists, or numbers in them"),
        ({"x": [[1, 2], [3]], "y": [[1, 2], [3, 4]]}, "1 numbers in the column 'x' and 2 in 'y'"),
        ({"x": [[1, 2], [3]]}, "its 3 tokens fill no row of pack=4"),
    ],
)
def test_what_cannot_be_packed_is_named(columns: Any, what: str, problems: FindProblems) -> None:
    found = problems(
        function=len,
        datasets={"train": pa.table(columns)},
        dataset_config={"train": DataConfig(pack=4)},
    )
    assert what in found.only("datasets['train']").what


@pytest.mark.parametrize("pack", [0, -1, 1.5, True, "2048"])
def test_a_wrong_length_is_named(pack: Any, problems: FindProblems) -> None:
    found = problems(
        function=len,
        datasets={"train": {"x": TEXTS}},
        dataset_config={"train": DataConfig(pack=pack)},
    )
    assert repr(pack) in found.only("dataset_config['train'].pack").what
