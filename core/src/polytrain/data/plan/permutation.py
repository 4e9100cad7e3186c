"""A random order of any number of things that takes no memory: where each goes is computed.

Few things are sorted by random numbers that the key gives: each order is as likely as any other.

More of them go through a Feistel network over pairs (x mod a, x div a), a * b barely more than n,
whose halves are shifted in turn by a hash of the other one and a key; what falls outside is walked
on until it is inside.
J. Black, P. Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the generalized
Feistel construction, and cycle walking).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

_WORD = (1 << 64) - 1
_ROUNDS = 8

_FEW = 64
"""Of fewer things, the network's orders are not equally likely."""

# Odd constants with as many ones as zeros: a product with them spreads a number over the word.
_SPREAD = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)

_SPREAD_OF_WORDS = np.uint64(_SPREAD[0]), np.uint64(_SPREAD[1])
_HALF = np.uint64(32)

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

Numbers = TypeVar("Numbers", int, np.ndarray[Any, np.dtype[np.uint64]])
"""A number, or an array of 64-bit unsigned ones: the same is computed of both."""


class Permutation:
    """One of the orders of 0 … size - 1, the same on every machine for the same key."""

    def __init__(self, size: int, *key: int) -> None:
        """
        Args:
            size: how many things; at most 2 ** 62.
            key: which order: any numbers of 64 bits.
        """
        self._size = size
        self._a = math.isqrt(max(size - 1, 0)) + 1
        self._b = max(1, -(-size // self._a))
        packed = struct.pack(f"<{len(key)}q", *key)
        self._table = _sorted_by_chance(size, packed) if size < _FEW else None
        digest = hashlib.blake2b(packed, digest_size=8 * _ROUNDS).digest()
        self._keys = tuple(struct.iter_unpack("<QQ", digest))

    def __call__(self, place: Numbers) -> Numbers:
        """What comes at a place of the order; of an array, at each of its places."""
        if self._table is not None:
            found: Numbers = _at(self._table, place)
            return found
        if isinstance(place, int):
            return self._walk(place, self._forward)
        return self._walk_all(place)

    def inverse(self, thing: int) -> int:
        """The place in the order at which a thing comes."""
        if self._table is not None:
            return int(np.flatnonzero(self._table == thing)[0])
        return self._walk(thing, self._backward)

    def _walk(self, x: int, step: Callable[[int], int]) -> int:
        x = step(x)
        while x >= self._size:
            x = step(x)
        return x

    def _walk_all(self, places: Words) -> Words:
        found = self._forward_all(places)
        while (outside := found >= self._size).any():
            found[outside] = self._forward_all(found[outside])
        return found

    def _forward(self, x: int) -> int:
        a, b = self._a, self._b
        low, high = x % a, x // a
        for even, odd in self._keys:
            low = (low + _hash(high, even)) % a
            high = (high + _hash(low, odd)) % b
        return low + a * high

    def _forward_all(self, x: Words) -> Words:
        """The same of an array, computed in as little memory as possible, which is faster."""
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

    def _backward(self, x: int) -> int:
        a, b = self._a, self._b
        low, high = x % a, x // a
        for even, odd in reversed(self._keys):
            high = (high - _hash(low, odd)) % b
            low = (low - _hash(high, even)) % a
        return low + a * high


def _sorted_by_chance(size: int, key: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    drawn = b"".join(
        hashlib.blake2b(key, person=part.to_bytes(8, "little")).digest()
        for part in range(-(-size // 8))
    )
    return np.argsort(np.frombuffer(drawn, "<u8")[:size], kind="stable").astype(np.uint64)


def _at(table: np.ndarray[Any, Any], place: Any) -> Any:
    return int(table[place]) if isinstance(place, int) else table[place]


def _hash(value: int, key: int) -> int:
    """32 bits, so that adding to them overflows nowhere."""
    mixed = ((value + key) * _SPREAD[0]) & _WORD
    mixed = ((mixed ^ (mixed >> 32)) * _SPREAD[1]) & _WORD
    return mixed >> 32


def _hashed(values: Words, key: int, mixed: Words, room: Words) -> Words:
    """The same of an array, in `mixed`. Its numbers wrap around by themselves."""
    np.add(values, np.uint64(key), out=mixed)
    mixed *= _SPREAD_OF_WORDS[0]
    np.right_shift(mixed, _HALF, out=room)
    mixed ^= room
    mixed *= _SPREAD_OF_WORDS[1]
    mixed >>= _HALF
    return mixed


def _shift(half: Words, by: Words, size: np.uint64) -> None:
    """Add to one half of the pairs, modulo its size; `by` is used up."""
    half += by
    # NumPy divides by a constant four times as fast as it takes a remainder.
    np.floor_divide(half, size, out=by)
    by *= size
    half -= by
