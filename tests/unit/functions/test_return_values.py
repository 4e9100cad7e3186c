"""What a training function returns is the same value afterwards, or an error says why not."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.errors import ReturnValueError
from polytrain.functions.return_values import Returned, encoded, from_bytes, to_bytes

MIB = 1 << 20

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    # Text that no UTF-8 has, which is pickled.
    | st.text(st.characters())
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(value: Any, *, rank: int = 0, world_size: int = 1) -> Returned:
    [returned] = from_bytes(to_bytes([encoded(value, rank=rank, world_size=world_size)]))
    assert returned is not None
    return returned


@given(value=plain)
def test_plain_values_come_back(value: Any) -> None:
    assert repr(there_and_back(value).value(rank=0, may_unpickle=True)) == repr(value)


@dataclass
class Score:
    auc: float


class Named(dict[str, int]):
    """A subclass, which isn't a dict when it comes back as one."""


SAFE = [
    {"loss": 0.5, "by": ((1, 2), [3])},
    (math.inf, None, True, b"\xff"),
    np.float64(0.5),
    {"weights": np.arange(6.0).reshape(2, 3)},
    np.array("2026-01-01", dtype="datetime64[D]"),
]


@pytest.mark.parametrize("value", SAFE, ids=repr)
def test_plain_values_and_arrays_are_read_without_unpickling(value: Any) -> None:
    back = there_and_back(value).value(rank=0, may_unpickle=False)
    assert (type(back), repr(back)) == (type(value), repr(value))


@pytest.mark.parametrize(
    "value", [Score(0.5), Named(a=1), {1, 2}, np.array([{}], dtype=object), 2**70], ids=repr
)
def test_other_values_are_pickled_and_read_on_request(value: Any) -> None:
    returned = there_and_back(value)
    back = returned.value(rank=0, may_unpickle=True)
    assert (type(back), repr(back)) == (type(value), repr(value))
    with pytest.raises(ReturnValueError, match=r"from_path\(path, allow_pickle=True\)"):
        returned.value(rank=0, may_unpickle=False)


def test_a_value_that_can_not_be_pickled_is_named() -> None:
    with pytest.raises(ReturnValueError, match=r"rank 3 .*a lock can't be pickled.*plain values"):
        there_and_back(threading.Lock()).value(rank=3, may_unpickle=True)


@pytest.mark.parametrize(
    ("rank", "world_size", "size", "limit"),
    [(0, 1, 17, "16.0"), (0, 1000, 17, "16.0"), (1, 2, 17, "16.0"), (1, 64, 5, "4.0")],
)
def test_a_value_that_is_too_large_is_named(
    rank: int, world_size: int, size: int, limit: str
) -> None:
    returned = there_and_back(bytes(size * MIB), rank=rank, world_size=world_size)
    with pytest.raises(ReturnValueError, match=f"takes more than {limit} MiB, the limit for this"):
        returned.value(rank=rank, may_unpickle=True)
    kept = there_and_back(bytes((size - 2) * MIB), rank=rank, world_size=world_size)
    assert kept.kind == "plain"


class Counting:
    """Counts how often it is pickled."""

    pickled = 0

    def __init__(self) -> None:
        self.content = bytes(MIB)

    def __reduce__(self) -> tuple[Any, ...]:
        Counting.pickled += 1
        return Counting, (), {"content": self.content}


@pytest.mark.parametrize("make", [Counting, lambda: np.zeros(MIB // 8)])
def test_what_is_too_large_is_not_encoded_to_its_end(make: Any) -> None:
    Counting.pickled = 0
    # One object each: equal ones would be pickled once.
    returned = encoded([object, *(make() for _ in range(64))], rank=0, world_size=1)
    assert returned.kind == "lost"
    assert Counting.pickled < 20


def test_a_pickle_that_can_not_be_read_here_is_named() -> None:
    broken = Returned(kind="pickled", data=b"no pickle")
    with pytest.raises(ReturnValueError, match=r"rank 2 .* can't be read in this process"):
        broken.value(rank=2, may_unpickle=True)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x91\x01", b"\x05"])
def test_another_file_is_not_taken_for_values(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the return values"):
        from_bytes(data)
