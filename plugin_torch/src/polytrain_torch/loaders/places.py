"""Finds a data loader's place, the stored position, in a checkpoint.

Places are numbered in the order in which loaders are first prepared. Loaders that aren't split are
numbered apart, because one rank alone may prepare them. A loader that the same call prepares again,
as in a loop over epochs, takes the place of the earlier one and continues its epochs. So a restart
that begins with a later epoch finds the right place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from polytrain import get_context
from polytrain.extension import Cursor, DataPosition, Plan, open_cursor
from polytrain_torch.loaders.stream_places import resume_at_own_place
from polytrain_torch.randomness import seed_of
from polytrain_torch.survivors.byte_code import instruction_of

_Calls = tuple[tuple[Any, int], ...]
"""Code object and instruction offset of each frame on the stack."""


def open_place(
    plan: Plan, *, name: str | None, is_shared: bool
) -> tuple[str, Cursor[DataPosition]]:
    """Open the place of a loader that is being prepared; return its name and cursor.

    Args:
        plan: the order of its items. Without names, loaders with the same seed get different
            orders.
        name: its name in checkpoints; None for a number.
        is_shared: whether all ranks share the place; otherwise each rank has its own.
    """
    if name is not None:
        return name, open_cursor(plan, name=name)
    global _of_context
    context = get_context()
    # In an inline run, several attempts share a process.
    if _of_context is None or _of_context[0] is not context:
        _of_context = context, {each: _Numbered(each) for each in (True, False)}
    return _of_context[1][is_shared].open(plan, _calls())


@dataclass
class _Place:
    number: int
    calls: _Calls
    cursor: Cursor[DataPosition]


@dataclass
class _Numbered:
    """Places that all ranks share, or those that they don't: both are numbered apart."""

    is_shared: bool
    _all: list[_Place] = field(default_factory=list)

    def open(self, plan: Plan, calls: _Calls) -> tuple[str, Cursor[DataPosition]]:
        earlier = (each for each in self._all if each.calls == calls and each.cursor.was_read)
        place = next(earlier, None)
        number = len(self._all) if place is None else place.number
        plan = replace(plan, seed=plan.seed + self._offset(number, calls))
        kind = "data loader" if self.is_shared else "data loader that isn't split"
        name = f"{kind} {number}"
        cursor = open_cursor(plan, name=name)
        if place is None and not self.is_shared:
            resume_at_own_place(name, cursor)
        opened = _Place(number, calls, cursor)
        if place is None:
            self._all.append(opened)
        else:
            self._all[number] = opened
        return name, cursor

    def _offset(self, number: int, calls: _Calls) -> int:
        """Return an offset that tells a place's seed from other places', equal on all ranks."""
        if self.is_shared:
            return number
        # Other ranks may have prepared fewer loaders before the same call.
        before = sum(each.calls == calls for each in self._all)
        names = [(code.co_qualname, instruction) for code, instruction in calls]
        return seed_of(f"{names} {before}", octets=3)


_of_context: tuple[Any, dict[bool, _Numbered]] | None = None
"""The attempt's context, and its places by whether ranks share them."""


def _calls() -> _Calls:
    frame: FrameType | None = sys._getframe()
    calls = []
    while frame is not None:
        calls.append((frame.f_code, instruction_of(frame)))
        frame = frame.f_back
    return tuple(calls)
