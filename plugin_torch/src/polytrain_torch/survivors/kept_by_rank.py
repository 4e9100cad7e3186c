"""All ranks' small states at one point. A lost rank's is derived from the last one it kept."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polytrain.extension import KeptState, NotCleanError
from polytrain_torch.checkpoints.rank_parts import digest
from polytrain_torch.survivors.generators import canonical
from polytrain_torch.survivors.gpu_copies import arrived

State = dict[str, Any]

LENGTHS = struct.Struct("<5Q")
"""The lengths of four generators' states, and of what else a small state has."""

_LOST = "rank {rank} was lost before the end of its step, and"

_ALIKE = ("progress", "groups", "parts", "sample")
"""What of a lost rank's state is taken from another one."""

SmallState = tuple[State, list[torch.Tensor]]
"""A small state, and all buffers."""

_Kept = tuple[State, bytes]
"""A small state, and the bytes of all buffers."""


@dataclass
class KeptByRank:
    """All ranks' small states at one point."""

    kept: Mapping[int, Sequence[KeptState]]
    first: int
    """The first point after the last step."""

    point: int
    mine: int
    buffers: Sequence[torch.Tensor]
    sent: set[int]
    """Ids of the buffers that DDP sends from rank 0."""

    by_forward: Collection[int] = ()
    """Ids of the buffers that a forward pass alone changes: those of batch norms."""

    are_alike: bool = False
    """Whether ranks end each step with the same buffers and random numbers: virtual workers' do."""

    needs_own: bool = False
    """Whether what a lost rank had alone must be known, and not another one's."""

    gpu_bytes: int = 0
    """Bytes before a small state, where a GPU writes its buffers; the others come behind it."""

    def state(self, rank: int) -> SmallState:
        """Return a rank's state and buffers at the point.

        A rank that was lost before it would have done what this one did: all run the same code.

        Raises:
            NotCleanError: they are lost.
        """
        own = self._at(rank, self.point)
        if own is not None:
            return own[0], self._tensors(own[1])
        if self.are_alike:
            return self._like_mine(rank)
        for point in reversed(range(self.first, self.point)):
            last, here = self._at(rank, point), self._at(self.mine, point)
            if last is not None and here is not None:
                return self._continued(rank, last, here, last, here)
        theirs, mine = (self._at(each, self.first, is_forecast=True) for each in (rank, self.mine))
        if theirs is None or mine is None:
            raise NotCleanError(f"rank {rank} was lost, and its random numbers aren't known")
        if theirs[0].get("forwards") != mine[0].get("forwards"):
            raise NotCleanError(
                f"{_LOST.format(rank=rank)} not all of its forward passes are known"
            )
        before, here = (self._at(each, self.first - 1) for each in (rank, self.mine))
        if before is None or here is None:
            raise NotCleanError(f"rank {rank} was lost in its first step")
        return self._continued(rank, before, here, theirs, mine)

    def _like_mine(self, rank: int) -> SmallState:
        """Return this rank's state and buffers, if a lost rank had the same ones before.

        Raises:
            NotCleanError: it hadn't, or nobody knows.
        """
        now = self._at(self.mine, self.point)
        assert now is not None
        earlier = self._pairs_before(rank)
        is_known = bool(earlier) and max(earlier) >= self.first - 1
        if not is_known or any(
            its[1] != mine[1] or digest(its[0]) != digest(mine[0]) for its, mine in earlier.values()
        ):
            raise NotCleanError(f"{_LOST.format(rank=rank)} isn't known to be like the others")
        _, here = earlier[max(earlier)]
        if digest(now[0]["places"]) != digest(here[0]["places"]):
            raise NotCleanError(f"{_LOST.format(rank=rank)} its place in its data isn't known")
        return now[0], self._tensors(now[1])

    def _pairs_before(self, rank: int) -> dict[int, tuple[_Kept, _Kept]]:
        """Return a lost rank's states and this one's, by the points at which both are known.

        That before the first step is left out: ranks may begin alike and differ later.
        """
        pairs = {}
        for point in {each.point for each in self.kept.get(rank, ())}:
            its, mine = self._at(rank, point), self._at(self.mine, point)
            if 1 < point < self.point and its is not None and mine is not None:
                pairs[point] = its, mine
        return pairs

    def _continued(
        self, rank: int, before: _Kept, here_before: _Kept, last: _Kept, here_last: _Kept
    ) -> SmallState:
        """Return the state that a lost rank would have at the point.

        Args:
            rank: the lost rank.
            before: its state at an earlier point.
            here_before: this rank's at that point.
            last: the last that is known of its random numbers and buffers.
            here_last: the same of this rank.
        """
        lost = _LOST.format(rank=rank)
        now = self._at(self.mine, self.point)
        assert now is not None
        small = now[0]
        if here_last[0]["random"] != small["random"]:
            raise NotCleanError(f"{lost} the loop draws random numbers after the step")
        if digest(small["places"]) != digest(here_before[0]["places"]):
            raise NotCleanError(f"{lost} its place in its data isn't known")
        for theirs, ours in ((before, here_before), *self._pairs_before(rank).values()):
            if any(digest(theirs[0][kind]) != digest(ours[0][kind]) for kind in _ALIKE):
                raise NotCleanError(f"{lost} a part of TrainingState differs between the ranks")
        buffers = self._tensors(last[1])
        its, was_here, is_here = (self._tensors(each[1]) for each in (before, here_before, now))
        here = self._tensors(here_last[1])
        # Those that DDP sends first: others may be copies of them.
        for number in sorted(range(len(buffers)), key=lambda each: not self._is_sent(each)):
            # Only rank 0's are sent, and a loop may change them after the forward pass.
            is_known = rank != 0 or _equal(here[number], is_here[number])
            if self._is_sent(number) and is_known:
                continue
            if _equal(its[number], was_here[number]) and _equal(buffers[number], here[number]):
                buffers[number] = is_here[number]
                continue
            by_forward = id(self.buffers[number]) in self.by_forward
            if by_forward and _equal(here[number], is_here[number]):
                continue
            source = self._source_of(number, is_here)
            if source is None:
                raise NotCleanError(f"{lost} a buffer differs between the ranks")
            buffers[number] = buffers[source]
        own, unknown = _own_since(
            last[0].get("own", {}),
            here_last[0].get("own", {}),
            small["own"],
            [(its[0]["own"], mine[0]["own"]) for its, mine in self._pairs_before(rank).values()],
        )
        if self.needs_own and unknown:
            raise NotCleanError(f"{lost} what it had alone isn't known: {unknown}")
        own_state = {"random": last[0]["random"], "own": own, "places": before[0]["places"]}
        return {**small, **own_state}, buffers

    def _is_sent(self, number: int) -> bool:
        return id(self.buffers[number]) in self.sent

    def _source_of(self, number: int, values: Sequence[torch.Tensor]) -> int | None:
        """Return the model's buffer that another one, such as an average's, is a copy of."""
        return next(
            (
                other
                for other, each in enumerate(self.buffers)
                if self._is_sent(other)
                and other != number
                and each.numel() > 1
                and _equal(values[other], values[number])
            ),
            None,
        )

    def _tensors(self, content: bytes) -> list[torch.Tensor]:
        found, at = [], 0
        for buffer in self.buffers:
            piece = np.frombuffer(content, np.uint8, buffer.nbytes, at).copy()
            found.append(torch.from_numpy(piece).view(buffer.dtype).reshape(buffer.shape))
            at += buffer.nbytes
        return found

    def _at(self, rank: int, point: int, *, is_forecast: bool = False) -> _Kept | None:
        for each in reversed(self.kept.get(rank, ())):
            if (each.point, each.is_forecast) == (point, is_forecast):
                content = each.content[self.gpu_bytes :]
                on_gpu = arrived(each.content[: self.gpu_bytes]) if self.gpu_bytes else b""
                if on_gpu is None:
                    continue
                at, pieces = LENGTHS.size, []
                for length in LENGTHS.unpack_from(content):
                    pieces.append(content[at : at + length])
                    at += length
                own, *generators, small = pieces
                state: State = pickle.loads(small) if small else {}
                return {**state, "random": (canonical(own), *generators)}, on_gpu + content[at:]
        return None


def _own_since(
    theirs: State, ours: State, now: State, earlier: Sequence[tuple[State, State]]
) -> tuple[State, str]:
    """Return what a lost rank would have alone at a point, and what of it isn't known.

    This rank's forecast says what has changed since, and so what of the lost one's is still true.
    The rest both ranks have alike if they always had: a norm of gradients, for example.

    Args:
        theirs: the last that is known of the lost rank's.
        ours: this rank's of the same place.
        now: this rank's at the point.
        earlier: both ranks' at earlier points.
    """
    own, unknown = {}, ""
    for name, value in now.items():
        before = [(its[name], mine[name]) for its, mine in earlier if name in its and name in mine]
        if name in ours and ours[name] == value:
            if name in theirs:
                own[name] = theirs[name]
        elif isinstance(value, dict):
            own[name], inside = _own_since(theirs.get(name, {}), ours.get(name, {}), value, before)
            unknown = unknown or (inside and f"{name}.{inside}")
        else:
            own[name] = value
            if not before or any(its != mine for its, mine in before):
                unknown = unknown or str(name)
    return own, unknown


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
