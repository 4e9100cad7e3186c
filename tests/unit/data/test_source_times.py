"""NumPy's times and durations, in all of its units: exact, or refused with a remedy."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.shards import shard_of

from polytrain.data.types.python_values import in_unit_of_arrow
from polytrain.data_errors import SourceError

KEPT = ["D", "s", "ms", "us", "ns"]
FINER = {"Y": "D", "M": "D", "W": "D", "h": "s", "m": "s"}


def batch_of(data: Any) -> np.ndarray[Any, Any]:
    [batch] = shard_of(data).iter_batches(batch_size=100)
    return batch["t"]


# Durations in months and years have no one length.
UNITS = [("datetime64", unit) for unit in (*KEPT, *FINER)]
UNITS += [("timedelta64", unit) for unit in (*KEPT, *FINER) if unit not in "YM"]


@pytest.mark.parametrize("step", ["", "25"])
@pytest.mark.parametrize(("kind", "unit"), UNITS)
def test_times_of_every_unit_arrive_as_they_are(kind: str, unit: str, step: str) -> None:
    times = np.array([-7, 0, 3, "NaT"]).astype(f"{kind}[{step}{unit}]")
    found = batch_of({"t": times})
    wanted = FINER.get(unit, unit)
    assert found.dtype == f"{kind}[{'s' if kind == 'timedelta64' and unit in 'WD' else wanted}]"
    np.testing.assert_array_equal(found, times)


@pytest.mark.parametrize(
    "form",
    [
        list,
        lambda times: np.ma.array(times, mask=[False] * 3),
        lambda times: np.array([*times, None], dtype=object)[:3],
        lambda times: times.astype(times.dtype.newbyteorder(">")),
    ],
)
@pytest.mark.parametrize("unit", ["h", "25s", "10ms"])
def test_every_form_of_a_column_keeps_times(form: Any, unit: str) -> None:
    times = np.array([1, 2, 3], f"datetime64[{unit}]")
    np.testing.assert_array_equal(batch_of({"t": form(times)}), times)
    np.testing.assert_array_equal(batch_of([{"t": time} for time in times]), times)


def test_what_lies_behind_a_mask_does_not_matter() -> None:
    times = np.ma.array(np.array([1, 2**62], "datetime64[h]"), mask=[False, True])
    np.testing.assert_array_equal(batch_of({"t": times}), np.array([1, "NaT"], "datetime64[h]"))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (np.array([3], "timedelta64[M]"), "units of M, which have no one length"),
        (np.array([3], "timedelta64[Y]"), "units of Y, which have no one length"),
        (np.array([3], "timedelta64"), r'without a unit. .*astype\("timedelta64\[s\]"\)'),
        (np.array(["NaT"], "datetime64"), "without a unit"),
        (np.array([1500], "datetime64[ps]"), r'exactly. Round them.*astype\("datetime64\[ns\]"\)'),
        (np.array([1], "timedelta64[as]"), "exactly. Round them"),
        (np.array([2**62], "datetime64[h]"), "exactly. Round them, or replace"),
        (np.array([2**40], "datetime64[D]"), "millions of years away"),
    ],
)
def test_times_that_would_change_are_refused(times: Any, message: str) -> None:
    with pytest.raises(SourceError, match=rf"'t' has .*{message}"):
        shard_of({"t": times})


@given(
    st.sampled_from(["datetime64", "timedelta64"]),
    st.sampled_from(["W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"]),
    st.integers(1, 1000),
    st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_times_are_exact_or_refused(kind: str, unit: str, step: int, number: int) -> None:
    times = np.array([number], f"{kind}[{step}{unit}]")
    try:
        found = in_unit_of_arrow("t", times)
    except SourceError:
        return
    units = {"W": 604800 * 10**18, "D": 86400 * 10**18, "h": 3600 * 10**18, "m": 60 * 10**18}
    units |= {
        name: 10 ** (18 - 3 * place)
        for place, name in enumerate(["s", "ms", "us", "ns", "ps", "fs", "as"])
    }
    given_length = number * step * units[unit]
    assert int(found.view(np.int64)[0]) * units[np.datetime_data(found.dtype)[0]] == given_length
    assert pa.array(found).to_numpy(zero_copy_only=False)[0] == found[0]


@pytest.mark.parametrize(
    "kind", ["datetime64[D]", "datetime64[h]", "datetime64[us]", "timedelta64[s]"]
)
@pytest.mark.parametrize("lengths", [(2, 1), (2, 2), (0, 2)])
def test_lists_of_times_arrive_as_they_are(kind: str, lengths: tuple[int, int]) -> None:
    rows = [np.arange(length).astype(kind) for length in lengths]
    objects = np.empty(2, dtype=object)
    objects[:] = rows
    for data in ({"t": rows}, {"t": objects}, [{"t": row} for row in rows]):
        for row, found in zip(rows, batch_of(data), strict=True):
            np.testing.assert_array_equal(found, row)
            assert found.dtype.kind == row.dtype.kind


def test_lists_of_times_get_the_finest_unit() -> None:
    rows = [np.array(["2020-01-01", "NaT"], "datetime64[D]"), np.array([5], "datetime64[us]")]
    found = batch_of({"t": [*rows, None]})
    assert [row.dtype for row in found[:2]] == [np.dtype("datetime64[us]")] * 2
    np.testing.assert_array_equal(found[0], rows[0])
    assert found[2] is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([np.array([1, 2], "timedelta64[M]"), np.array([1], "timedelta64[M]")], "of M, which have"),
        ([np.array([2**60], "datetime64[s]"), np.zeros(2, "datetime64[ns]")], "one unit"),
        ([np.zeros(2, "datetime64[s]"), np.zeros(1)], r"rows of datetime64\[s\] and float64"),
        ([np.zeros(2, "datetime64[s]"), np.zeros(1, "timedelta64[s]")], "Give all rows one type"),
    ],
)
def test_lists_of_times_that_do_not_go_together_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(SourceError, match=rf"'t' has .*{message}"):
        shard_of({"t": rows})


def test_lists_of_python_times_and_of_texts() -> None:
    day = datetime.datetime(2020, 1, 1)  # without a zone, as many are
    assert batch_of({"t": [[day], [day, day]]})[1].tolist() == [day, day]
    for rows in ([["a"], ["b", "c"]], [["a"], ["b"]], [["a"], ["b", None]]):
        assert [row.tolist() for row in batch_of({"t": rows})] == rows
