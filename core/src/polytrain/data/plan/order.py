"""The order of a canonical shard's rows in one epoch. Pure, and of constant size."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

_ROUNDS = 8

_FEW = 64
"""Below this size, the network's orders aren't equally likely."""

# Odd constants with as many ones as zeros: a product with them spreads a number over the word.
_SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


class Permutation:
    """A random order of 0 … size - 1, the same on every machine for the same key.

    It takes no memory: the number at each place is computed. Fewer than 64 numbers are sorted by
    random words that the key gives: all orders are equally likely.

    More numbers go through a Feistel network over pairs (x mod a, x div a), where a * b is barely
    more than `size`. Each round shifts one half by a hash of the other half and a key. Results
    outside 0 … size - 1 are mapped again until they are inside.
    J. Black, P. Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the generalized
    Feistel construction, and cycle walking).
    """

    def __init__(self, size: int, *key: int) -> None:
        """
        Args:
            size: at most 2 ** 62.
            key: any numbers of 64 bits.
        """
        self._size = size
        self._a = math.isqrt(max(size - 1, 0)) + 1
        self._b = max(1, -(-size // self._a))
        packed = struct.pack(f"<{len(key)}q", *key)
        self._table = _sorted_by_random_words(size, packed) if size < _FEW else None
        digest = hashlib.blake2b(packed, digest_size=8 * _ROUNDS).digest()
        self._keys = tuple(struct.iter_unpack("<QQ", digest))

    def __call__(self, places: Words) -> Words:
        """The numbers at these places of the order."""
        if self._table is not None:
            return self._table[places]
        return self._inside(places, self._forward)

    def inverse(self, number: int) -> int:
        """The place of a number in the order."""
        if self._table is not None:
            return int(np.flatnonzero(self._table == number)[0])
        return int(self._inside(np.array([number], np.uint64), self._backward)[0])

    def _inside(self, x: Words, step: Callable[[Words], Words]) -> Words:
        x = step(x)
        while (outside := x >= self._size).any():
            x[outside] = step(x[outside])
        return x

    def _forward(self, x: Words) -> Words:
        """One pass through the network, in as little memory as possible, which is faster."""
        a, b = np.uint64(self._a), np.uint64(self._b)
        high = x // a
        low = x - high * a
        room = (np.empty_like(x), np.empty_like(x))
        for even, odd in self._keys:
            _shift(low, _hashed(high, even, *room), a)
            _shift(high, _hashed(low, odd, *room), b)
        high *= a
        high += low
        return high

    def _backward(self, x: Words) -> Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        low, high = x % a, x // a
        room = (np.empty_like(x), np.empty_like(x))
        for even, odd in reversed(self._keys):
            high = (high + b - _hashed(low, odd, *room) % b) % b
            low = (low + a - _hashed(high, even, *room) % a) % a
        return low + a * high


def _sorted_by_random_words(size: int, key: bytes) -> Words:
    words = b"".join(
        hashlib.blake2b(key, person=part.to_bytes(8, "little")).digest()
        for part in range(-(-size // 8))
    )
    return np.argsort(np.frombuffer(words, "<u8")[:size], kind="stable").astype(np.uint64)


def _hashed(values: Words, key: int, mixed: Words, room: Words) -> Words:
    """Hash values to 32 bits, so that adding them to a half doesn't overflow. Writes to `mixed`."""
    np.add(values, np.uint64(key), out=mixed)
    mixed *= _SPREAD[0]
    np.right_shift(mixed, _HALF, out=room)
    mixed ^= room
    mixed *= _SPREAD[1]
    mixed >>= _HALF
    return mixed


def _shift(half: Words, by: Words, size: np.uint64) -> None:
    """Add to one half of the pairs, modulo its size. Overwrites `by`."""
    half += by
    # NumPy divides by a constant four times as fast as it takes a remainder.
    np.floor_divide(half, size, out=by)
    by *= size
    half -= by


# What permutations are used for, as a part of their keys: no two uses share an order.
_ORDER_OF_WINDOWS, _WITHIN_WINDOW = range(2)

_BLOCK = 1 << 12
"""Number of places that are computed together."""

RowNumbers: TypeAlias = np.ndarray[Any, Any]


class Selection(NamedTuple):
    """Rows of a region of the data set, in the order in which they are used.

    A tuple, because each batch needs some: making a dataclass takes three times as long.
    """

    region: range
    """Consecutive rows of the data set."""

    places: range
    """The selected places in the region's order."""

    rows_at: Callable[[range], RowNumbers] | None = None
    """Returns the row numbers at places; None if the region's rows keep their order."""

    number: int = 0
    """Of a mix: the pass over the source, each of which has another order in the same region."""

    @property
    def rows(self) -> range | RowNumbers:
        """Row numbers in the data set."""
        if self.rows_at is None:
            return self.region[self.places.start : self.places.stop]
        return self.rows_at(self.places)

    @property
    def whole(self) -> Selection:
        """All rows of the region."""
        return self._replace(places=range(len(self.region)))


class ShardOrder:
    """The order of a canonical shard's rows in one epoch: windows, and rows within each window.

    Without shuffling, and if all rows are shuffled, the shard is one window.
    """

    def __init__(self, rows: range, key: tuple[int, ...] | None, window: int | None = None) -> None:
        """
        Args:
            key: decides the order; None leaves the rows as they are.
            window: rows in a window. Windows begin at its multiples, so the first and the last one
                may have fewer rows. None for one window.
        """
        self._rows = rows
        self._key = key
        self._size = window or max(1, len(rows))
        self._origin = rows.start - (rows.start % window if window else 0)
        self._count = -(-(rows.stop - self._origin) // self._size) if rows else 0
        self._windows: _ShuffledRange | None = None
        # Place of a window → number of rows that it has less than others.
        self._short: dict[int, int] = {}
        if self._count > 1 and key is not None:
            windows = Permutation(self._count, _ORDER_OF_WINDOWS, *key)
            self._windows = _ShuffledRange(range(self._count), windows)
            for number in (0, self._count - 1):
                self._short[windows.inverse(number)] = self._size - len(self._window(number))
        # The window that was selected from last: its first index, its rows, and their order.
        self._last: tuple[int, range, _ShuffledRange | None] = (0, range(0), None)

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, indices: range) -> Iterator[Selection]:
        """The rows at these indices of the order, window by window."""
        while indices:
            start, window, rows_at = self._window_of(indices.start)
            first = indices.start - start
            places = range(first, min(first + len(indices), len(window)))
            yield Selection(region=window, places=places, rows_at=rows_at)
            indices = indices[len(places) :]

    def _window_of(self, index: int) -> tuple[int, range, _ShuffledRange | None]:
        """The window that has an index; see `_last`."""
        start, window, _ = self._last
        if not start <= index < start + len(window):
            place = number = self._place(index)
            if self._windows is not None:
                number = int(self._windows(range(place, place + 1))[0])
            window, rows_at = self._window(number), None
            if self._key is not None:
                permutation = Permutation(len(window), _WITHIN_WINDOW, *self._key, number)
                rows_at = _ShuffledRange(window, permutation)
            self._last = self._start(place), window, rows_at
        return self._last

    def _window(self, number: int) -> range:
        start = self._origin + number * self._size
        return range(max(start, self._rows.start), min(start + self._size, self._rows.stop))

    def _place(self, index: int) -> int:
        """The place of the window that has this index."""
        place = index // self._size
        while place + 1 < self._count and self._start(place + 1) <= index:
            place += 1
        return place

    def _start(self, place: int) -> int:
        """The first index of the window at this place."""
        start = place * self._size
        for short, missing in self._short.items():
            if short < place:
                start -= missing
        return start


class GroupOrder:
    """The order of groups, as an order of their rows. Indices count groups."""

    def __init__(self, groups: ShardOrder, starts: RowNumbers) -> None:
        """
        Args:
            starts: the first row of each group, and the number of rows after the last one.
        """
        self._groups = groups
        self._starts = starts
        # The region that was selected from last, its rows in order, and each group's end in them.
        self._last: tuple[Any, ...] = (None,)

    def __len__(self) -> int:
        return len(self._groups)

    def select(self, indices: range) -> Iterator[Selection]:
        """The rows of the groups at these indices, window by window."""
        return map(self._rows_of, self._groups.select(indices))

    def _rows_of(self, groups: Selection) -> Selection:
        region = self._range(groups.region)
        if groups.rows_at is None:
            rows = self._range(groups.region[groups.places.start : groups.places.stop])
            places = range(rows.start - region.start, rows.stop - region.start)
            return Selection(region=region, places=places)
        if self._last[0] != groups.region:
            self._last = groups.region, *self._arrangement(groups.whole.rows)
        _, rows_in_order, ends = self._last
        return Selection(
            region=region,
            places=range(int(ends[groups.places.start]), int(ends[groups.places.stop])),
            rows_at=lambda places: rows_in_order[places.start : places.stop],
        )

    def _range(self, groups: range) -> range:
        if not groups:
            return range(0)
        return range(int(self._starts[groups.start]), int(self._starts[groups.stop]))

    def _arrangement(self, groups: Any) -> tuple[RowNumbers, RowNumbers]:
        """The rows of these groups in order, and the index in them where each group ends."""
        starts = self._starts[groups]
        sizes = self._starts[groups + 1] - starts
        ends = np.append(0, np.cumsum(sizes))
        return np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes), ends


class _ShuffledRange:
    """Consecutive numbers in a random order.

    A permutation takes about as long for a few places as for thousands, so small selections share a
    block of them.
    """

    def __init__(self, numbers: range, permutation: Permutation) -> None:
        self._range = numbers
        self._permutation = permutation
        # Replaced as a whole: threads that read ahead use it, too.
        self._block: tuple[range, RowNumbers] = (range(0), np.empty(0, np.int64))

    def __call__(self, places: range) -> RowNumbers:
        """The numbers at these places."""
        if len(places) >= _BLOCK:
            return self._computed(places)
        block, numbers = self._block
        if places.start < block.start or places.stop > block.stop:
            block = range(places.start, min(places.start + _BLOCK, len(self._range)))
            numbers = self._computed(block)
            self._block = block, numbers
        return numbers[places.start - block.start : places.stop - block.start]

    def _computed(self, places: range) -> RowNumbers:
        words = np.arange(places.start, places.stop, dtype=np.uint64)
        return self._permutation(words).astype(np.int64) + self._range.start
