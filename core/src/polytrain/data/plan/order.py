"""The order of a canonical shard's rows in one epoch. Pure, and of constant size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from polytrain.data.plan.permutation import Permutation

# What the keys of permutations are for: no two uses may share an order.
_WHOLE_SHARD, _ORDER_OF_WINDOWS, _WITHIN_WINDOW = range(3)

_BLOCK = 1 << 12
"""Places that are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows to take one after another: a part of a region of the data, as it is arranged."""

    region: range
    """Consecutive rows of the data set."""

    place: range
    """Which of them, counted in the order in which they are arranged."""

    arrange: Callable[[range], np.ndarray[Any, Any]] | None = None
    """Places → numbers of the rows there; None where the rows lie as they come."""

    @property
    def rows(self) -> range | np.ndarray[Any, Any]:
        """Numbers of the rows in the data set."""
        if self.arrange is None:
            return self.region[self.place.start : self.place.stop]
        return self.arrange(self.place)

    @property
    def whole(self) -> RowSelection:
        """All rows of the region."""
        return replace(self, place=range(len(self.region)))


class Order(ABC):
    """The order of a canonical shard's rows in one epoch."""

    @abstractmethod
    def __getitem__(self, index: int) -> int:
        """The row that comes at this place."""

    @abstractmethod
    def pick(self, indices: range) -> Iterator[RowSelection]:
        """The rows that come at these places."""

    @abstractmethod
    def regions(self, index: int) -> Iterator[RowSelection]:
        """All that is picked from this place on, region by region: to have it at hand in time."""


class InOrder(Order):
    """As the rows come."""

    def __init__(self, rows: range) -> None:
        self._rows = rows

    def __getitem__(self, index: int) -> int:
        return self._rows[index]

    def pick(self, indices: range) -> Iterator[RowSelection]:
        rows = self._rows[indices.start : indices.stop]
        yield RowSelection(region=rows, place=range(len(rows)))

    def regions(self, index: int) -> Iterator[RowSelection]:
        yield from self.pick(range(index, len(self._rows)))


class Shuffled(Order):
    """Every row anywhere."""

    def __init__(self, rows: range, key: tuple[int, ...]) -> None:
        self._rows = rows
        self._permutation = Permutation(len(rows), _WHOLE_SHARD, *key)
        self._arranged = _Arranged(rows, self._permutation)

    def __getitem__(self, index: int) -> int:
        return self._rows.start + self._permutation(index)

    def pick(self, indices: range) -> Iterator[RowSelection]:
        yield RowSelection(region=self._rows, place=indices, arrange=self._arranged)

    def regions(self, index: int) -> Iterator[RowSelection]:
        yield from (picked.whole for picked in self.pick(range(index, index + 1)))


class Windows(Order):
    """Windows in any order, of which the first and the last in the data may be shorter."""

    def __init__(self, rows: range, size: int, key: tuple[int, ...]) -> None:
        self._rows = rows
        self._size = size
        self._key = key
        self._first = rows.start // size
        self._count = -(-rows.stop // size) - self._first if rows else 0
        self._windows = Permutation(self._count, _ORDER_OF_WINDOWS, *key)
        # Place in the order → rows that are missing there to a full window.
        self._short: dict[int, int] = {}
        for window in {0, self._count - 1} if rows else ():
            self._short[self._windows.inverse(window)] = size - len(self._window(window))
        # Place, and the rows there: what is asked for next is most likely there, too.
        self._last = (0, 0, 0)
        self._within = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> int:
        place = self._place(index)
        window, permutation, _ = self._within(place)
        return window.start + permutation(index - self._last[1])

    def pick(self, indices: range) -> Iterator[RowSelection]:
        while indices:
            place = self._place(indices.start)
            start = self._start(place)
            window, _, arranged = self._within(place)
            inside = range(indices.start - start, min(indices.stop - start, len(window)))
            yield RowSelection(region=window, place=inside, arrange=arranged)
            indices = indices[len(inside) :]

    def regions(self, index: int) -> Iterator[RowSelection]:
        for place in range(self._place(index), self._count):
            window, _, arranged = self._within(place)
            yield RowSelection(region=window, place=range(len(window)), arrange=arranged)

    def _permutation(self, place: int) -> tuple[range, Permutation, _Arranged]:
        number = self._windows(place)
        window = self._window(number)
        permutation = Permutation(len(window), _WITHIN_WINDOW, *self._key, number)
        return window, permutation, _Arranged(window, permutation)

    def _window(self, number: int) -> range:
        start = (self._first + number) * self._size
        return range(max(start, self._rows.start), min(start + self._size, self._rows.stop))

    def _place(self, index: int) -> int:
        place, start, stop = self._last
        if start <= index < stop:
            return place
        place = index // self._size
        while place + 1 < self._count and self._start(place + 1) <= index:
            place += 1
        self._last = place, self._start(place), self._start(place + 1)
        return place

    def _start(self, place: int) -> int:
        """Where in the order the window at this place begins."""
        return place * self._size - sum(
            missing for short, missing in self._short.items() if short < place
        )


class OrderOfGroups(Order):
    """An order of groups, as an order of their rows. Places are those of groups."""

    def __init__(self, groups: Order, starts: np.ndarray[Any, Any]) -> None:
        self._groups = groups
        self._starts = starts
        # Of the region that was picked from last.
        self._arranged: tuple[Any, ...] = (None,)

    def __getitem__(self, index: int) -> int:
        return int(self._starts[self._groups[index]])

    def pick(self, indices: range) -> Iterator[RowSelection]:
        return map(self._picked, self._groups.pick(indices))

    def regions(self, index: int) -> Iterator[RowSelection]:
        return map(self._picked, self._groups.regions(index))

    def _picked(self, groups: RowSelection) -> RowSelection:
        if groups.arrange is None:
            rows = self._range(groups.region[groups.place.start : groups.place.stop])
            return RowSelection(region=rows, place=range(len(rows)))
        key = groups.region.start, groups.region.stop
        if self._arranged[0] != key:
            self._arranged = key, *self._arrangement(groups.whole.rows)
        _, rows_in_order, ends = self._arranged
        place = range(int(ends[groups.place.start]), int(ends[groups.place.stop]))
        return RowSelection(
            region=self._range(groups.region),
            place=place,
            arrange=lambda wanted: rows_in_order[wanted.start : wanted.stop],
        )

    def _range(self, groups: range) -> range:
        if not groups:
            return range(0)
        return range(int(self._starts[groups.start]), int(self._starts[groups.stop]))

    def _arrangement(self, groups: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The rows of these groups, and where among them each group begins and the last ends."""
        starts = self._starts[groups]
        sizes = self._starts[groups + 1] - starts
        ends = np.append(0, np.cumsum(sizes))
        return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes), ends


class _Arranged:
    """Places of permuted rows → the rows there.

    A permutation takes about as long for a few places as for thousands, so that small batches share
    what it gives for a block of them.
    """

    def __init__(self, rows: range, permutation: Permutation) -> None:
        self._rows = rows
        self._permutation = permutation
        # Replaced as a whole: threads that read ahead use it, too.
        self._last: tuple[range, np.ndarray[Any, Any]] = (range(0), np.empty(0, np.int64))

    def __call__(self, places: range) -> np.ndarray[Any, Any]:
        if len(places) >= _BLOCK:
            return self._computed(places)
        block, rows = self._last
        if places.start < block.start or places.stop > block.stop:
            block = range(places.start, min(places.start + _BLOCK, len(self._rows)))
            rows = self._computed(block)
            self._last = block, rows
        return rows[places.start - block.start : places.stop - block.start]

    def _computed(self, places: range) -> np.ndarray[Any, Any]:
        numbers = np.arange(places.start, places.stop, dtype=np.uint64)
        return self._permutation(numbers).astype(np.int64) + self._rows.start
