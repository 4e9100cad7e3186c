"""The fingerprint of a data set: the same for the same rows, another one for others."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import polytrain.data.fingerprint
from polytrain.data.fingerprint import digests, digests_of_sample, fingerprint
from polytrain.data.read.describe import describe

VALUES: dict[str, tuple[pa.DataType, Any, Any]] = {
    "int8": (pa.int8(), 1, 2),
    "uint8": (pa.uint8(), 1, 2),
    "int16": (pa.int16(), 1, 2),
    "int64": (pa.int64(), -(2**63), 2**63 - 1),
    "uint64": (pa.uint64(), 0, 2**64 - 1),
    "float16": (pa.float16(), np.float16(0.5), np.float16(1.5)),
    "float32": (pa.float32(), 0.5, 1.5),
    "float64": (pa.float64(), 0.5, 1.5),
    "infinite": (pa.float64(), 0.5, float("inf")),
    "bool": (pa.bool_(), True, False),
    "decimal": (pa.decimal128(9, 2), Decimal("1.25"), Decimal("1.50")),
    "string": (pa.string(), "a", "b"),
    "large string": (pa.large_string(), "a", "b"),
    "binary": (pa.binary(), b"a", b"b"),
    "category": (pa.dictionary(pa.int32(), pa.string()), "a", "b"),
    "date": (pa.date32(), date(2024, 1, 1), date(2024, 1, 2)),
    "time": (pa.time64("us"), time(1), time(2)),
    "timestamp": (
        pa.timestamp("us", tz="UTC"),
        datetime(2024, 1, 1, tzinfo=UTC),
        datetime(2025, 1, 1, tzinfo=UTC),
    ),
    "duration": (pa.duration("us"), timedelta(1), timedelta(2)),
    "list": (pa.list_(pa.int64()), [1], [1, 2]),
    "fixed list": (pa.list_(pa.float32(), 2), [1.0, 2.0], [2.0, 1.0]),
    "struct": (pa.struct({"x": pa.int64()}), {"x": 1}, {"x": 2}),
    "null": (pa.null(), None, None),
}


@pytest.fixture(params=["whole", "sampled"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "sampled":
        monkeypatch.setattr(polytrain.data.fingerprint, "_WHOLE_BYTES", 0)


def of(kind: pa.DataType, values: list[Any]) -> str:
    table = pa.table({"x": pa.array(values, kind)})
    source = describe("train", table)
    return fingerprint(source, digests(source))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("kind", "first", "second"), VALUES.values(), ids=VALUES)
def test_every_type_of_column_has_one(kind: pa.DataType, first: Any, second: Any) -> None:
    rows = [first, None, second]
    assert of(kind, rows) == of(kind, rows)
    assert of(kind, rows) != of(kind, rows[:2])
    if first != second:
        assert of(kind, rows) != of(kind, rows[::-1])
        assert of(kind, rows) != of(kind, [first, None, first])


def test_one_number_of_a_large_table_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polytrain.data.fingerprint, "_WHOLE_BYTES", 0)
    numbers = [0.0] * 10_000
    before = of(pa.float16(), numbers)
    numbers[7] = 1.0
    assert of(pa.float16(), numbers) != before


class Items:
    """A map-style data set."""

    def __init__(self, values: list[float], noise: float = 0.0) -> None:
        self.values = values
        self.noise = noise
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        value = self.values[index] + self.noise * self.random.random()
        return {"value": value, "name": f"item {value:.3f}"}


def sample_of(data: Any) -> dict[str, str]:
    return digests_of_sample(describe("train", data))


@pytest.mark.parametrize("changed", [0, 2, 3])
def test_items_are_known_by_some_of_them(changed: int) -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    others = [*values[:changed], 9.0, *values[changed + 1 :]]
    assert sample_of(Items(values)) == sample_of(Items(values)) != {}
    assert sample_of(Items(values)) != sample_of(Items(others))


def test_few_of_many_items_are_read() -> None:
    read: set[int] = set()

    class Counted(Items):
        def __getitem__(self, index: int) -> dict[str, Any]:
            read.add(index)
            return super().__getitem__(index)

    sample_of(Counted([0.0] * 10_000))
    assert len(read) <= 8
    assert {0, 9_999} <= read


def test_items_that_are_drawn_anew_are_not_compared() -> None:
    assert sample_of(Items([1.0, 2.0], noise=1.0)) == {}


def test_data_with_digests_needs_no_sample() -> None:
    assert sample_of(pa.table({"x": [1, 2]})) == {}


@pytest.mark.parametrize(
    ("before", "renewed"),
    [
        ("abfs://c@a/x.csv?sv=1&se=May&sig=K", "abfs://c@a/x.csv?sv=2&se=June&sig=L"),
        (
            "https://b.s3/x?X-Amz-Date=1&X-Amz-Credential=K/1&X-Amz-Signature=a&id=7",
            "https://b.s3/x?X-Amz-Date=2&X-Amz-Credential=K/2&X-Amz-Signature=b&id=7",
        ),
        ("https://me:K@host/x.csv", "https://you:L@host/x.csv"),
    ],
)
def test_a_renewed_signature_makes_no_other_data(before: str, renewed: str) -> None:
    def known(path: str) -> dict[str, str]:
        piece: Any = SimpleNamespace(path=path, version=(12, 34), rows=3)
        piece.unwrapped = piece
        source: Any = SimpleNamespace(stream=None, mix=None, pieces=[piece])
        return digests(source)

    assert known(before) == known(renewed)
    assert known(before) != known(before.replace("x", "y", 1))
    assert known(before.split("?")[0]) != known(f"{before.split('?')[0]}?id=8")
