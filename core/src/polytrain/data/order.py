"""The order of a canonical shard's rows in one epoch. Pure, and of constant size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from polytrain.data.permutation import Permutation

# What the keys of permutations are for: no two uses may share an order.
_WHOLE_SHARD, _ORDER_OF_WINDOWS, _WITHIN_WINDOW = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Rows to take one after another, and where they lie."""

    rows: range | np.ndarray[Any, Any]
    """Numbers of rows in the data set."""

    region: range
    """Consecutive rows that hold them all; what comes next is most likely in it, too."""


class Order(ABC):
    """The order of a canonical shard's rows in one epoch."""

    scatters = True
    """Whether rows are picked from all over a region, rather than one after another."""

    @abstractmethod
    def __getitem__(self, index: int) -> int:
        """The row that comes at this place."""

    @abstractmethod
    def pick(self, indices: range) -> Iterator[Picked]:
        """The rows that come at these places."""

    @abstractmethod
    def regions(self, index: int) -> Iterator[range]:
        """Where rows are picked from, from this place on: to have them at hand in time."""


class InOrder(Order):
    """As the rows come."""

    scatters = False

    def __init__(self, rows: range) -> None:
        self._rows = rows

    def __getitem__(self, index: int) -> int:
        return self._rows[index]

    def pick(self, indices: range) -> Iterator[Picked]:
        rows = self._rows[indices.start : indices.stop]
        yield Picked(rows=rows, region=rows)

    def regions(self, index: int) -> Iterator[range]:
        yield self._rows[index:]


class Shuffled(Order):
    """Every row anywhere."""

    def __init__(self, rows: range, key: tuple[int, ...]) -> None:
        self._rows = rows
        self._permutation = Permutation(len(rows), _WHOLE_SHARD, *key)

    def __getitem__(self, index: int) -> int:
        return self._rows.start + self._permutation(index)

    def pick(self, indices: range) -> Iterator[Picked]:
        yield Picked(rows=_permuted(self._rows, self._permutation, indices), region=self._rows)

    def regions(self, index: int) -> Iterator[range]:
        yield self._rows


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
        self._within = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> int:
        place = self._place(index)
        window, permutation = self._within(place)
        return window.start + permutation(index - self._start(place))

    def pick(self, indices: range) -> Iterator[Picked]:
        while indices:
            place = self._place(indices.start)
            start = self._start(place)
            window, permutation = self._within(place)
            inside = range(indices.start - start, min(indices.stop - start, len(window)))
            yield Picked(rows=_permuted(window, permutation, inside), region=window)
            indices = indices[len(inside) :]

    def regions(self, index: int) -> Iterator[range]:
        for place in range(self._place(index), self._count):
            yield self._window(self._windows(place))

    def _permutation(self, place: int) -> tuple[range, Permutation]:
        number = self._windows(place)
        window = self._window(number)
        return window, Permutation(len(window), _WITHIN_WINDOW, *self._key, number)

    def _window(self, number: int) -> range:
        start = (self._first + number) * self._size
        return range(max(start, self._rows.start), min(start + self._size, self._rows.stop))

    def _place(self, index: int) -> int:
        place = index // self._size
        while place + 1 < self._count and self._start(place + 1) <= index:
            place += 1
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
        self.scatters = groups.scatters

    def __getitem__(self, index: int) -> int:
        return int(self._starts[self._groups[index]])

    def pick(self, indices: range) -> Iterator[Picked]:
        for picked in self._groups.pick(indices):
            yield Picked(rows=self._rows(picked.rows), region=self._range(picked.region))

    def regions(self, index: int) -> Iterator[range]:
        return map(self._range, self._groups.regions(index))

    def _range(self, groups: range) -> range:
        if not groups:
            return range(0)
        return range(int(self._starts[groups.start]), int(self._starts[groups.stop]))

    def _rows(self, groups: range | np.ndarray[Any, Any]) -> range | np.ndarray[Any, Any]:
        if isinstance(groups, range):
            return self._range(groups)
        starts, stops = self._starts[groups], self._starts[groups + 1]
        sizes = stops - starts
        # Each group's rows follow the ones of the group before.
        before = np.cumsum(sizes) - sizes
        rows: np.ndarray[Any, Any] = np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
        return rows


def _permuted(rows: range, permutation: Permutation, indices: range) -> np.ndarray[Any, Any]:
    places = np.arange(indices.start, indices.stop, dtype=np.uint64)
    return permutation(places).astype(np.int64) + rows.start
