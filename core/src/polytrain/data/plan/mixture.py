"""The order of a mix: which source has a position, and which of its rows. Pure.

Sources get positions as tasks get a processor's time in S. Baruah, N. Cohen, C. Plaxton, D. Varvel:
"Proportionate Progress", Algorithmica 15, 1996: of the sources whose next row is due, the one with
the earliest deadline. So a source's count after any number of positions is its exact share, rounded
down or up. The order of sources repeats itself after a period, of which a table is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import gcd, lcm
from typing import Any, TypeAlias

import numpy as np

from polytrain.data.plan.order import Selection, ShardOrder
from polytrain.storage.typed_json import Count

_LONGEST_PERIOD = 1 << 16

Numbers: TypeAlias = np.ndarray[Any, Any]


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of positive weights, which decimals have exactly.

    If their sum would be above 65,536, shares are rounded to about 1 / 65,536.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common, total = lcm(*(each.denominator for each in exact)), sum(exact)
    parts = [int(each * common) for each in exact]
    least = gcd(*parts)
    if sum(parts) // least > _LONGEST_PERIOD:
        parts = [max(1, round(each / total * _LONGEST_PERIOD)) for each in exact]
        least = gcd(*parts)
    return tuple(part // least for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sources that share an epoch's positions. Their rows are numbered one source after another.

    A source begins a new pass over its rows, in a new order, whenever it is exhausted, and goes on
    in the next epoch where it was.
    """

    rows: tuple[Count, ...]
    """Number of rows of each source."""

    parts: tuple[Count, ...]
    """Number of positions of each source in a period, which is their sum."""

    @property
    def all_rows(self) -> int:
        """Number of rows of all sources together."""
        return sum(self.rows)

    def rows_of(self, source: int) -> range:
        """The numbers of a source's rows."""
        starts = tuple(accumulate(self.rows, initial=0))
        return range(starts[source], starts[source + 1])

    def position_of(self, source: int, index: int) -> int:
        """The position of a source's row with this index in an epoch, however long that is."""
        periods, left = divmod(index, self.parts[source])
        sources, of_source = _period(self.parts)
        return periods * len(sources) + int(of_source[source][left])

    def drawn(self, source: int, positions: int) -> int:
        """The number of a source's rows at so many positions from an epoch's start."""
        sources, of_source = _period(self.parts)
        periods, left = divmod(positions, len(sources))
        return periods * self.parts[source] + int(of_source[source].searchsorted(left))

    def share(self, positions: range) -> Iterator[tuple[int, range]]:
        """The rows at consecutive positions of an epoch, source by source.

        Yields:
            A source, and indices in its order of the epoch.
        """
        for source in range(len(self.parts)):
            drawn = (self.drawn(source, end) for end in (positions.start, positions.stop))
            if indices := range(*drawn):
                yield source, indices

    def order(self, positions: range) -> Numbers:
        """The places of the rows at these positions, in order, among the rows of `share`."""
        sources, _ = _period(self.parts)
        at = sources[np.arange(positions.start, positions.stop) % len(sources)]
        return np.argsort(np.argsort(at, kind="stable"))

    def order_of(
        self, source: int, epoch: int, length: int, order: Callable[[range, int], ShardOrder]
    ) -> SourceOrder:
        """The order of a source's rows in one epoch.

        Args:
            length: number of positions in each epoch.
            order: returns the order of rows in a pass, for its number.
        """
        rows, count = self.rows_of(source), self.drawn(source, length)
        return SourceOrder(rows, epoch * count, count, lambda number: order(rows, number))


class SourceOrder:
    """The order of a source's rows in one epoch: a part of its passes, one after another."""

    def __init__(
        self, rows: range, first: int, count: int, order_of_pass: Callable[[int], ShardOrder]
    ) -> None:
        """
        Args:
            first: number of its rows that earlier epochs have had, over all passes.
            count: number of rows in this epoch.
            order_of_pass: returns the order of the rows in a pass, for its number.
        """
        self._rows = rows
        self._first = first
        self._count = count
        self._order_of_pass = order_of_pass
        self._last: tuple[int, ShardOrder] | None = None

    def __len__(self) -> int:
        return self._count

    def select(self, indices: range) -> Iterator[Selection]:
        """The rows at these indices of the order, pass by pass, window by window."""
        while indices:
            number, first = divmod(self._first + indices.start, len(self._rows))
            places = range(first, min(first + len(indices), len(self._rows)))
            if self._last is None or self._last[0] != number:
                self._last = number, self._order_of_pass(number)
            for selection in self._last[1].select(places):
                yield selection._replace(number=number)
            indices = indices[len(places) :]


@lru_cache(maxsize=8)
def _period(parts: tuple[int, ...]) -> tuple[Numbers, list[Numbers]]:
    """The source of each position of a period, and the positions of each source."""
    period = sum(parts)
    sources = np.empty(period, np.int64)
    given = [0] * len(parts)
    due: list[list[int]] = [[*range(len(parts))], *([] for _ in range(period))]
    ready: list[tuple[int, int]] = []
    for position in range(period):
        for source in due[position]:
            heappush(ready, (-(-(given[source] + 1) * period // parts[source]), source))
        _, source = heappop(ready)
        sources[position] = source
        given[source] += 1
        due[max(position + 1, given[source] * period // parts[source])].append(source)
    return sources, np.split(np.argsort(sources, kind="stable"), np.cumsum(parts)[:-1])
