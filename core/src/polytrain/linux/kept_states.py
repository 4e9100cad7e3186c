"""The small states of a worker process, in memory that outlives it.

At each clean point of its training a process writes here what its peers can't know: its random
numbers, buffers, and places in its data. Its agent reads them after a loss, also if the process was
killed in the middle of a write: a state that is torn doesn't count.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = 64
"""Bytes before a slot's state; no two slots share a cache line."""

_BEGUN, _POINT, _IS_FORECAST, _LENGTH, _ENDED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """One rank's small state at a point of the training that all ranks pass."""

    point: int
    """The number of the clean point. Ranks that train together count alike."""

    is_forecast: bool
    """Whether the rank hadn't reached the point yet: it had only computed its gradients."""

    content: bytes


class KeptStates:
    """The memory, for its one writer or for a reader."""

    POINTS = 6
    """Number of the last clean points that have a slot. A GPU may be some behind its process."""

    _SLOTS = POINTS + 4
    """Those of two points' forecasts have two slots each: one is whole while the other is torn."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        """
        Args:
            descriptor: the memory's, which stays open.
            capacity: maximum bytes of a state.
        """
        self.descriptor = descriptor
        self.capacity = capacity
        self._slot = _HEADER + (capacity + _HEADER - 1) // _HEADER * _HEADER
        self.memory = memoryview(mmap.mmap(descriptor, self._slot * self._SLOTS))
        """All of it."""

        begins = range(0, len(self.memory), self._slot)
        self._headers = [self.memory[begin : begin + _HEADER].cast("Q") for begin in begins]
        self.newest_at = 0
        """Where the content of the state begins that was written last."""

        self._written = 0

    @classmethod
    def new(cls, capacity: int) -> KeptStates:
        """Return new memory for states of up to this many bytes."""
        descriptor = os.memfd_create("polytrain-kept")
        os.ftruncate(descriptor, (_HEADER * 2 + capacity) * cls._SLOTS)
        return cls(descriptor, capacity)

    def put(self, pieces: Sequence[bytes | memoryview], *, point: int, is_forecast: bool) -> bool:
        """Write a state; return whether there was room for it.

        Args:
            pieces: its content, one piece after the other.
            point: number of the clean point.
            is_forecast: see `KeptState`.
        """
        content = b"".join(pieces)
        if len(content) > self.capacity:
            return False
        self._written += 1
        number = point % self.POINTS
        if is_forecast:
            number = self.POINTS + point % 2 * 2 + self._written % 2
        begin = number * self._slot
        header = self._headers[number]
        header[_BEGUN] = self._written
        at = self.newest_at = begin + _HEADER
        self.memory[at : at + len(content)] = content
        header[_POINT], header[_IS_FORECAST] = point, is_forecast
        header[_LENGTH] = len(content)
        # Last: until then the state doesn't count.
        header[_ENDED] = self._written
        return True

    def read(self) -> tuple[KeptState, ...]:
        """Return the whole states, oldest first."""
        found = []
        for number, header in enumerate(self._headers):
            begin = number * self._slot
            order = header[_ENDED]
            length = min(header[_LENGTH], self.capacity)
            state = KeptState(
                point=header[_POINT],
                is_forecast=bool(header[_IS_FORECAST]),
                content=bytes(self.memory[begin + _HEADER : begin + _HEADER + length]),
            )
            # A live writer may have begun another state meanwhile.
            if order and header[_BEGUN] == order == header[_ENDED]:
                found.append((order, state))
        return tuple(state for _, state in sorted(found, key=lambda each: each[0]))

    def close(self) -> None:
        """Release the memory here; the other side keeps its own mapping."""
        for each in (*self._headers, self.memory):
            each.release()
        os.close(self.descriptor)
