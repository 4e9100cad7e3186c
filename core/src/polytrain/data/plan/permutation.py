"""Random orders of 0 … n - 1 that take no memory: the number at each place is computed.

Fewer than 64 numbers are sorted by random words that the key gives: all orders are equally likely.

More numbers go through a Feistel network over pairs (x mod a, x div a), where a * b is barely more
than n. Each round shifts one half by a hash of the other half and a key. Results outside 0 … n - 1
are mapped again until they are inside.
J. Black, P. Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the generalized
Feistel construction, and cycle walking).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

_ROUNDS = 8

_FEW = 64
"""Below this size, the network's orders aren't equally likely."""

# Odd constants with as many ones as zeros: a product with them spreads a number over the word.
_SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


class Permutation:
    """A random order of 0 … size - 1, the same on every machine for the same key."""

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
