"""Which place in a checkpoint is a data loader's.

Places have numbers, in the order in which loaders are first prepared. A loader that the same call
prepares later, as in a loop over epochs, takes the place of the earlier one and continues its
epochs. So a restart that begins with a later epoch finds the place of that epoch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from polytrain import get_context
from polytrain.extension import Cursor, DataPosition, Plan, open_cursor

_Calls = tuple[tuple[Any, int], ...]
"""Code and instruction of each call on the stack."""


def open_place(plan: Plan) -> tuple[str, Cursor[DataPosition]]:
    """Open the place of a loader that is being prepared, and return its name too.

    Args:
        plan: the order of its items. Loaders of the same seed get different orders.
    """
    global _places
    context = get_context()
    # In an inline run, several attempts share a process.
    if _places is None or _places.context is not context:
        _places = _Places(context)
    return _places.open(plan, _calls())


@dataclass
class _Place:
    number: int
    calls: _Calls
    cursor: Cursor[DataPosition]
    first_epoch: int

    @property
    def has_begun(self) -> bool:
        """Whether its loader has been iterated over."""
        return self.cursor.next_epoch().number > self.first_epoch


@dataclass
class _Places:
    """The places of one attempt."""

    context: Any
    _all: list[_Place] = field(default_factory=list)

    def open(self, plan: Plan, calls: _Calls) -> tuple[str, Cursor[DataPosition]]:
        earlier = (each for each in self._all if each.calls == calls and each.has_begun)
        place = next(earlier, None)
        number = len(self._all) if place is None else place.number
        plan = replace(plan, seed=plan.seed + number)
        name = f"data loader {number}"
        cursor = open_cursor(plan, name=name)
        opened = _Place(number, calls, cursor, cursor.next_epoch().number)
        if place is None:
            self._all.append(opened)
        else:
            self._all[number] = opened
        return name, cursor


_places: _Places | None = None


def _calls() -> _Calls:
    frame: FrameType | None = sys._getframe()
    calls = []
    while frame is not None:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)
