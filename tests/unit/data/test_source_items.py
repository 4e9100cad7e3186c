"""Map-style data sets: item after item, by number."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from polytrain.data.read.describe import describe
from polytrain.data.read.indexed import IndexedPiece
from polytrain.data.types.columns import column_to_numpy
from polytrain.data_errors import ReadError, SourceError


@dataclass
class Items:
    """A map-style data set whose items are these."""

    items: list[Any]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        if isinstance(item, BaseException):
            raise item
        return item


def piece_of(*items: Any, **options: Any) -> IndexedPiece:
    [piece] = describe("train", Items(list(items)), **options).pieces
    assert isinstance(piece, IndexedPiece)
    return pickle.loads(pickle.dumps(piece))


def test_tuples_have_numbered_columns() -> None:
    piece = piece_of((1, "a"), (2, "b"))
    assert piece.read(0, 2).to_pydict() == {"0": [1, 2], "1": ["a", "b"]}


def test_dicts_have_named_columns() -> None:
    piece = piece_of({"x": 1, "y": 2}, {"y": 4, "x": 3})
    assert piece.read(0, 2).to_pydict() == {"x": [1, 3], "y": [2, 4]}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 2, pa.int64()),
        (True, False, pa.bool_()),
        (0.5, 1, pa.float64()),
        ("a", "b", pa.string()),
        (b"a", b"\xff", pa.binary()),
        (np.float32(1), np.float32(2), pa.float32()),
        (np.array(3, np.int8), np.array(4, np.int8), pa.int8()),
    ],
)
def test_single_values_are_a_column(first: Any, second: Any, expected: pa.DataType) -> None:
    found = piece_of(first, second).read(0, 2)
    assert found.schema == pa.schema([("0", expected)])
    assert found.column("0").to_pylist() == [first, second]


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.bool_, np.float16])
def test_arrays_are_a_column_of_tensors(dtype: Any) -> None:
    images = (np.arange(24) % 3).reshape(4, 2, 3).astype(dtype)
    found = column_to_numpy(piece_of(*images).read(1, 3).column("0"))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, images[1:3])


def test_torch_data_sets() -> None:
    torch = pytest.importorskip("torch", reason="the torch backend is not installed")
    from torch.utils.data import Subset, TensorDataset

    images = torch.arange(12.0, requires_grad=True).reshape(3, 2, 2)
    dataset = TensorDataset(images, torch.tensor([5, 6, 7]))
    [piece] = describe("train", Subset(dataset, [2, 0])).pieces
    found = piece.read(0, 2)
    assert column_to_numpy(found.column("0")).tolist() == images[[2, 0]].tolist()
    assert found.column("1").to_pylist() == [7, 5]


@pytest.mark.parametrize(
    "values",
    [
        [1, np.int64(2), np.int8(3), np.array(4), True],
        [0.5, 1, np.float32(2), np.float64(3)],
        [np.float32(1), np.float16(2)],
        [True, np.True_],
        [np.zeros(2), np.ones(2, np.float32), np.arange(2, dtype=np.int8)],
        [np.zeros(2, ">f4"), np.ones(2, "<f4")],
        ["a", np.str_("b")],
        [b"a", np.bytes_(b"b")],
    ],
)
def test_values_of_several_types_are_as_they_would_be_alone(values: list[Any]) -> None:
    piece = piece_of(*values)
    alone = pa.concat_tables([piece.read(row, row + 1) for row in range(len(values))])
    assert piece.read(0, len(values)).equals(alone.combine_chunks())


def test_tensors_of_torch_are_as_their_arrays() -> None:
    torch = pytest.importorskip("torch", reason="the torch backend is not installed")
    tensors = [torch.arange(6.0).reshape(2, 3) * row for row in range(4)]
    tensors[1].requires_grad_()
    expected = piece_of(*(tensor.detach().numpy() for tensor in tensors)).read(0, 4)
    assert piece_of(*tensors).read(0, 4).equals(expected)
    mixed = [tensors[0], tensors[2].double()]
    with pytest.raises(ReadError, match="item 1 of Items, '0': float64 of shape"):
        piece_of(*mixed).read(0, 2)


def test_shapes_that_differ_are_found_though_their_sizes_add_up() -> None:
    with pytest.raises(ReadError, match=r"item 1 of Items, '0': float64 of shape \(1,\), where"):
        piece_of(np.zeros(2), np.zeros(1), np.zeros(3)).read(0, 3)


def test_an_item_that_is_used_again_gives_what_it_held() -> None:
    class Again(Items):
        item: dict[str, int] = {}  # noqa: RUF012  # one for all of them, which is the point

        def __getitem__(self, index: int) -> Any:
            self.item["x"] = index
            return self.item

    [piece] = describe("train", Again([None] * 3)).pieces
    assert piece.read(0, 3).to_pydict() == {"x": [0, 1, 2]}


def test_items_are_taken_in_any_order() -> None:
    piece = piece_of(*({"x": n, "y": n * n} for n in range(10)))
    assert piece.take([7, 0, 7], ["y"]).to_pydict() == {"y": [49, 0, 49]}
    assert piece.take(np.array([3, 1])).to_pydict() == {"x": [3, 1], "y": [9, 1]}
    assert piece.take([]).num_rows == 0
    assert piece.seekable(scattered=True)


def test_only_the_first_item_is_needed_to_describe() -> None:
    failing = [ValueError("not asked for")] * 5
    assert describe("train", Items([(1, 2), *failing])).info.num_rows == 6


def test_columns_of_items() -> None:
    """What else the items have is not looked at."""
    piece = piece_of({"x": 1, "y": object()}, {"x": 2, "y": None}, columns=["x"])
    assert piece.read(0, 2).to_pydict() == {"x": [1, 2]}


def test_an_item_that_raises_is_named() -> None:
    piece = piece_of(1, 2, KeyError("lost.jpg"))
    assert piece.read(0, 2).num_rows == 2
    with pytest.raises(ReadError, match=r"^KeyError: 'lost\.jpg' \(.*line.*: item 2 of Items") as (
        caught
    ):
        piece.read(1, 3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_item_that_exits_ends_no_training_function() -> None:
    with pytest.raises(ReadError, match=r"^SystemExit: 0 \(.*line.*: item 1 of Items"):
        piece_of(1, SystemExit(0)).read(0, 2)


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "text among numbers": (1, "a", "item 1 of Items, '0': str, where the first item has int64"),
    "a number among texts": ("a", 1, "'0': int, where the first item has str"),
    "bytes among texts": ("a", b"a", "'0': bytes, where the first item has str"),
    "a fraction among integers": (1, 0.5, "'0': float64 .* int64"),
    "nothing": (1, None, "'0': NoneType"),
    "another shape": (np.ones((2, 3)), np.ones((2, 4)), r"shape \(2, 4\).*shape \(2, 3\)"),
    "an array among numbers": (1.0, np.ones(1), r"shape \(1,\).*shape \(\)"),
    "a wider type": (np.float32(1), np.float64(1), "float64 .* float32"),
    "a large number among fractions": (0.5, 2**53 + 1, "item 1 of Items.*round 9007199254740993"),
    "large numbers among fractions": (np.ones(1), np.array([2**53 + 1]), "round 9007199254740993"),
    "masked values": (np.ones(2), np.ma.array([1.0, 2.0], mask=[0, 1]), "'0': .*masked"),
    "fewer values": ((1, 2), (1,), "item 1 of Items has '0', where .* has '0', '1'"),
    "more values": ((1,), (1, 2), "item 1 of Items has '0', '1', where .* has '0'"),
    "other keys": ({"x": 1}, {"y": 1}, "has 'y', where the first item has 'x'"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_an_item_that_differs_from_the_first_is_named(case: str) -> None:
    first, second, message = DIFFERENT[case]
    with pytest.raises(ReadError, match=message):
        piece_of(first, second).read(0, 2)


REFUSED: dict[str, tuple[list[Any], str]] = {
    "no items": ([], "no rows"),
    "a first item that raises": ([OSError("disk")], "item 0 of Items can't be had: OSError: disk"),
    "an empty item": ([{}], "item 0 of Items is empty"),
    "nothing": ([None], "item 0 has None as '0'"),
    "a value of a class": ([(1, object())], "item 0 has an object as '1'"),
    "a dict in a dict": ([{"x": {"y": 1}}], "item 0 has a dict as 'x'"),
    "texts": ([{"x": ["a", "b"]}], "item 0 has a list as 'x'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_items_that_can_be_no_rows(case: str) -> None:
    items, message = REFUSED[case]
    with pytest.raises(SourceError, match=message) as caught:
        describe("train", Items(items))
    assert caught.value.remedy
