"""Proves that a training loop carries nothing from step to step outside of its `TrainingState`.

A restarted function begins again: its code, the restored parts, and the place in its data have to
bring it to the point where it was. A counter or a sum in a local variable would be lost, and the
training would continue wrongly. So the variables that the rest of the loop reads are compared with
those of the attempt's first two steps, and at first with those of the fetch before them: they have
to be the same, or to be in the saved progress.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count, islice
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from polytrain.extension import is_installed
from polytrain_torch.loaders.prepared import generators_of_data
from polytrain_torch.models.parallel import own_class
from polytrain_torch.private import COMPOSABLE_STATES, SET_BY_SCHEDULERS
from polytrain_torch.randomness import seed_in
from polytrain_torch.survivors.byte_code import (
    body_after,
    functions_of_loops,
    globals_of,
    instruction_of,
    loops_of,
    names_in_iterable,
    read_after,
    targets_around,
)
from polytrain_torch.survivors.snapshots import OURS, PLAIN, TRANSPARENT, Snapshot, plain
from polytrain_torch.virtual_workers import micro_batches

_WORKER_PROCESS = "polytrain.workers.session.worker_process"

_FETCHES, _AROUND = "fetches", "around"
"""The places of variables of `for` loops: of the one that fetches batches, or one around that."""

_Attribute = tuple[int, str, str]
"""The id of a module or an optimizer, its class, and the attribute's name."""

Frames = tuple[tuple[FrameType, int], ...]
"""The frames from a data loader's caller outwards, each with the instruction that it is at."""


def frames_from(frame: FrameType | None) -> Frames:
    """Return the frames of the training function and what it has called, innermost first."""
    found = []
    while frame is not None and frame.f_globals.get("__name__") != _WORKER_PROCESS:
        found.append((frame, instruction_of(frame)))
        frame = frame.f_back
    return tuple(found)


def fetch_of_step(fetches: Iterable[Frames]) -> Frames | None:
    """Return where the loop that runs now got its last batch; None if nowhere.

    A look at a batch, or an evaluation, may have fetched some before, while the training may have
    batches of its own.

    Args:
        fetches: the frames of each place that has fetched a batch, in order.
    """
    found, most = None, -1
    for frames in fetches:
        own = [each for each in frames if not (_is_between(each[0]) or _is_generator(each[0]))]
        if not own:
            continue
        fetching, at = own[0]
        body = body_after(fetching.f_code, at)
        if body is None:
            # What fetches by `next` may be a function of its own, which is over by now.
            loops = _loops_shared(own)
            if loops > most:
                found, most = frames, loops
        elif fetching in _running() and fetching.f_lasti in body:
            return frames
    return found


def _loops_shared(frames: Sequence[tuple[FrameType, int]]) -> int:
    """Return how many loops have both a fetch and what runs now in them.

    It is -1 if another thread has fetched, as it does ahead of the training.
    """
    running = _running()
    for frame, at in frames:
        if frame in running:
            return sum(at in loop and frame.f_lasti in loop for loop in loops_of(frame.f_code))
    return -1


def _running() -> list[FrameType]:
    """Return the frames that run now, innermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


@dataclass
class Loop:
    """The variables of a training loop at one time, such as the attempt's first step."""

    frames: Frames
    known: Sequence[Any]
    """The objects that checkpoints hold, or that rebuild themselves."""

    _first: _Variables = field(init=False)

    def __post_init__(self) -> None:
        self._first = _Variables(self.frames, self.known, has_batch=True)

    def is_at(self, frames: Frames) -> bool:
        """Return whether frames are at the same places of the code as this loop's."""
        return [(frame.f_code, at) for frame, at in frames] == [
            (frame.f_code, at) for frame, at in self.frames
        ]

    def carried(
        self,
        frames: Frames,
        progress: Mapping[str, Any],
        *,
        has_batch: bool,
        other: Loop | None = None,
    ) -> str | None:
        """Return what keeps a restart from continuing at a clean point; None if nothing does.

        Args:
            frames: the frames at the point.
            progress: the progress that `TrainingState.restore` would return.
            has_batch: whether a batch came next; otherwise the epoch was over.
            other: this loop at another time, since which nothing may have changed either.
        """
        library = _library(frames)
        if library is not None:
            return f"its loop is in {library}, whose counters aren't known"
        times = [each for each in (self, other) if each is not None]
        if not all(each.is_at(frames) for each in times):
            return "it trains in several places"
        if any(_takes_a_number(*each) for each in frames if not _is_between(each[0])):
            return (
                "its loop takes a number of batches (islice, or zip and range), and would begin to "
                "count again"
            )
        now = _Variables(frames, self.known, has_batch=has_batch)
        before = [each._first for each in times]
        if any(each.drawn != now.drawn for each in before):
            return "its data set draws from a generator of its own, which isn't in TrainingState"
        numbers = [each for each in progress.values() if type(each) is int]
        for (name, where), value in now.references.items():
            if all(each.has((name, where), now.snapshot, value) for each in before):
                continue
            # A restart that begins its loop with what is saved sets the variable to it.
            own = [progress[name]] if name in progress else []
            saved = numbers if where == _AROUND else own
            if any(isinstance(each, PLAIN) and value == plain(each) for each in saved):
                continue
            return f"its variable {name!r} changes from step to step, and isn't in TrainingState"
        for place, value in now.attributes.items():
            is_same = all(each.has_attribute(place, now.of_known, value) for each in before)
            if not is_same and value not in [(int, each) for each in numbers]:
                _, kind, name = place
                return (
                    f"{name!r} of a {kind} changes from step to step, and isn't in its state: pass "
                    "it to forward(), make it a buffer, or delete it after backward()"
                )
        return None


class _Variables:
    """What the variables hold that the code after these points reads."""

    def __init__(self, frames: Frames, known: Sequence[Any], *, has_batch: bool) -> None:
        parts = set(map(id, known))
        # Their order may change, and means nothing.
        drawn = [seed_in([each]) for each in generators_of_data() if id(each) not in parts]
        self.drawn = Counter(drawn)
        self.of_known = Snapshot(known, ())
        # Apart from the variables, which would be looked at less if there are many.
        self.snapshot = self.of_known.apart({frame.f_code for frame, _ in frames})
        self.attributes = {place: self.of_known.add(value) for place, value in _attributes(known)}
        self.of_known.take()
        self.references = {
            place: self.snapshot.add(value)
            for place, value in _values(frames, has_batch=has_batch).items()
        }
        self.snapshot.take()

    def has(self, place: tuple[str, str], snapshot: Snapshot, value: Any) -> bool:
        """Return whether a variable holds what another snapshot's value held."""
        mine = self.references.get(place)
        return mine is not None and self.snapshot.equals(mine, snapshot, value)

    def has_attribute(self, place: _Attribute, snapshot: Snapshot, value: Any) -> bool:
        """Return whether an attribute holds what another snapshot's value held."""
        mine = self.attributes.get(place)
        return mine is not None and self.of_known.equals(mine, snapshot, value)


def _values(frames: Frames, *, has_batch: bool) -> dict[tuple[str, str], Any]:
    """Return the values by the name and the place of their variable."""
    found: dict[tuple[str, str], Any] = {}
    users = [(depth, *each) for depth, each in enumerate(frames) if not _is_between(each[0])]
    hands_batches_on = True
    for number, (depth, frame, at) in enumerate(users):
        values = frame.f_locals
        is_over = number == 0 and not has_batch
        full = _loops_over(frame, micro_batches)
        for name in read_after(frame.f_code, at, is_over=is_over, never_empty=full):
            if name in values:
                found[name, str(depth)] = values[name]
        loops = targets_around(frame.f_code, at, endless=_loops_over(frame, count))
        for order, names in enumerate(loops):
            fetches = hands_batches_on and order == 0
            for name in names:
                if name in values and isinstance(values[name], PLAIN):
                    found.pop((name, str(depth)), None)
                    found[name, _FETCHES if fetches else _AROUND] = values[name]
        # The loop of a generator, or none at all, passes each batch on to the caller's.
        hands_batches_on &= not loops or _is_generator(frame)
        for name in globals_of(frame.f_code):
            if name in frame.f_globals:
                found[name, "module"] = frame.f_globals[name]
    return dict(sorted(found.items()))


def _attributes(known: Sequence[Any]) -> Iterator[tuple[_Attribute, Any]]:
    """Yield what modules and optimizers have beside their state.

    Of torch's own classes these are plain values.
    """
    for each in known:
        kind = own_class(each) if isinstance(each, torch.nn.Module) else type(each)
        is_users = kind.__module__.partition(".")[0] not in ("torch", *OURS)
        if isinstance(each, torch.nn.Module) and not isinstance(each, DistributedDataParallel):
            names = _OF_ANY_MODULE
        elif is_users and getattr(kind, "state_dict", None) is torch.optim.Optimizer.state_dict:
            names = _OF_ANY_OPTIMIZER
        else:
            continue
        # At once: the training may set attributes meanwhile.
        for name, value in [*vars(each).items()]:
            is_looked_at = isinstance(value, PLAIN) or (
                is_users and not _is_made_anew(each, name, value)
            )
            if name not in names and is_looked_at:
                yield (id(each), kind.__qualname__, name), value


def _is_made_anew(part: Any, name: str, value: Any) -> bool:
    """Whether each forward pass makes an attribute anew, as far as can be seen.

    So are weights that torch's `weight_norm`, `spectral_norm` and `prune` compute from parameters.
    A loss that is left for the caller isn't known from one that the next step uses, nor a hidden
    state from other tensors. A variable of a context is the same object in each step, and its
    values belong to callers.
    """
    if isinstance(value, torch.Tensor):
        sources = (getattr(part, f"{name}_{each}", None) for each in ("orig", "g"))
        return any(isinstance(each, torch.nn.Parameter) for each in sources)
    return isinstance(value, ContextVar)


_OF_ANY_MODULE = COMPOSABLE_STATES.union(vars(torch.nn.Module()))
"""Also "training": the loop sets it itself, before an evaluation and after."""


_OF_ANY_OPTIMIZER = frozenset((*vars(torch.optim.SGD([torch.nn.Parameter()])), *SET_BY_SCHEDULERS))


def _loops_over(frame: FrameType, function: Any) -> frozenset[int]:
    """Return where a frame's loops over what a function returns begin.

    There is always a micro-batch, for example, and no end of a `count`.
    """
    found = []
    for offset, (first, *others) in functions_of_loops(frame.f_code).items():
        value = frame.f_locals.get(first, frame.f_globals.get(first))
        for name in others:
            value = getattr(value, name, None) if isinstance(value, ModuleType) else None
        if value is function:
            found.append(offset)
    return frozenset(found)


def _takes_a_number(frame: FrameType, at: int) -> bool:
    """Whether a `for` loop ends by a count of its batches, which is in no variable."""
    names = names_in_iterable(frame.f_code, at)
    values = (frame.f_locals.get(name) for name in names)
    return (
        "islice" in names
        or {"zip", "range"} <= names
        or any(isinstance(each, islice) for each in values)
    )


def _is_between(frame: FrameType) -> bool:
    """Whether a frame only stands between the loop and its data."""
    return _package(frame) in TRANSPARENT


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _library(frames: Frames) -> str | None:
    """Return the installed package that a frame belongs to; None if all are the user's."""
    for frame, _ in frames:
        if not _is_between(frame) and is_installed(frame.f_code.co_filename):
            return _package(frame)
    return None
