"""The time and memory to select the next rows of an epoch of a billion, without reading any."""

from __future__ import annotations

import sys
import timeit
import tracemalloc
from collections.abc import Callable
from itertools import count

from harness import OURS, Bound, Figure, conclude, durations, parse, sizes

from polytrain.data.plan.order import ShardOrder
from polytrain.data.plan.row_plan import Plan, Shuffle

_ROWS = 10**9
_SHARDS = 8
_BATCH_ROWS = 1024
_ORDERS: dict[str, Shuffle] = {"in order": False, "any order": True, "windows": "window"}
_NEXT_ROW = "next row"
_FIVE_MICROSECONDS = Bound(factor=5e-6)


def next_row(shuffle: Shuffle, calls: int) -> float:
    """Seconds for one row of a shard after another, in an epoch that has begun."""
    order = _plan(shuffle).epoch(3).of_shard(0)
    indices = count(_ROWS // _SHARDS // 3)
    return _per_call(lambda: _row(order, next(indices)), calls)


def first_row(shuffle: Shuffle, calls: int) -> float:
    """Seconds for the first row of a shard, in the middle of an epoch that is resumed."""
    plan = _plan(shuffle)
    epochs = count()
    index = _ROWS // _SHARDS // 3
    return _per_call(lambda: _row(plan.epoch(next(epochs)).of_shard(0), index), calls // 20)


def batched_row(shuffle: Shuffle, calls: int) -> float:
    """Seconds for a row, in batches of one shard."""
    order = _plan(shuffle).epoch(3).of_shard(0)
    starts = count(_ROWS // _SHARDS // 3, _BATCH_ROWS)

    def batch() -> None:
        start = next(starts)
        for selection in order.select(range(start, start + _BATCH_ROWS)):
            assert len(selection.rows)

    return _per_call(batch, max(1, calls // 100)) / _BATCH_ROWS


def memory(shuffle: Shuffle, calls: int) -> float:
    """Bytes at the peak of a plan, a shard's order, and as many rows as are selected."""
    tracemalloc.start()
    try:
        order = _plan(shuffle).epoch(3).of_shard(0)
        first = _ROWS // _SHARDS // 3
        for index in range(first, first + calls):
            _row(order, index)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=7)
    calls = 1_000 if options.quick else 20_000
    figures = [
        Figure(
            what=f"{what}, {name}",
            samples={OURS: [measure(shuffle, calls) for _ in range(options.repetitions)]},
            bounds=[_FIVE_MICROSECONDS] if what == _NEXT_ROW and not options.quick else [],
            show=show,
        )
        for what, measure, show in _QUANTITIES
        for name, shuffle in _ORDERS.items()
    ]
    return conclude(f"An epoch of {_ROWS:,} rows, {_SHARDS} canonical shards", figures)


_QUANTITIES: tuple[tuple[str, Callable[[Shuffle, int], float], Callable[..., str]], ...] = (
    (_NEXT_ROW, next_row, durations),
    ("first row", first_row, durations),
    (f"row in {_BATCH_ROWS}", batched_row, durations),
    ("memory", memory, sizes),
)


def _plan(shuffle: Shuffle) -> Plan:
    return Plan(rows=_ROWS, shards=_SHARDS, shuffle=shuffle)


def _row(order: ShardOrder, index: int) -> int:
    [selection] = order.select(range(index, index + 1))
    return int(selection.rows[0])


def _per_call(function: Callable[[], object], calls: int) -> float:
    function()  # what is made once is made now
    return timeit.timeit(function, number=calls) / calls


if __name__ == "__main__":
    sys.exit(main())
