"""Writes the state that the training has at a clean point.

After a loss the thread of a survivor does, for all ranks; a single worker does for a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from polytrain import get_context
from polytrain.extension import KeptState, KeptStates, NotCleanError, Place
from polytrain_torch import randomness
from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    differences_of,
    digests_of,
    write_own,
)
from polytrain_torch.checkpoints.safe_serialization import save_safely
from polytrain_torch.checkpoints.state_files import write_state
from polytrain_torch.loaders import stream_places
from polytrain_torch.survivors.clean_points import CleanPoint, CleanPoints
from polytrain_torch.survivors.continuation import Continuation
from polytrain_torch.survivors.depot import Depot
from polytrain_torch.survivors.generators import restorable
from polytrain_torch.survivors.kept_by_rank import KeptByRank, SmallState, State
from polytrain_torch.survivors.live_parts import LiveParts
from polytrain_torch.virtual_workers import current as virtual_workers


class Files(Protocol):
    """Writes a checkpoint's files, except those of single ranks."""

    def __call__(self, directory: Path, whole: State, found: Differences, of_library: Any) -> None:
        """Write them.

        Args:
            directory: where to.
            whole: the state of rank 0: of all parts, its progress, and what is its own.
            found: which states differ between ranks.
            of_library: what a library's trainer knew at the point.
        """


def write_files(directory: Path, whole: State, found: Differences, of_library: Any) -> None:
    """Write the files of a `TrainingState`; see `Files`."""
    write_state(directory, whole["parts"], progress=whole["progress"], found=found)


class PointWriter:
    """The `StateWriter` of one attempt's `TrainingState`, or of a library's trainer."""

    def __init__(
        self,
        live: LiveParts,
        points: CleanPoints,
        continuation: Continuation,
        *,
        files: Files,
        depot: Depot | None,
        needs_own: bool,
    ) -> None:
        """
        Args:
            live: the parts of the state.
            points: where the training is.
            continuation: whether a restart would continue there.
            files: writes a checkpoint's files.
            depot: has the small states of ranks on other hosts; None if there is none.
            needs_own: whether what a lost rank had alone must be known, and not another one's.
        """
        self._live = live
        self._points = points
        self._continuation = continuation
        self._files = files
        self._depot = depot
        self._needs_own = needs_own
        self._held: CleanPoint | None = None
        self.kept: KeptStates | None = None
        """The memory of this rank's small states."""

        self.why_not: str | None = None
        """Why the training passes no more points; None if it does."""

    def hold(self, point: int, has_time: Callable[[], bool]) -> int:
        """See `StateWriter`."""
        found = self._points.hold(point, has_time)
        if found is None:
            why = self._continuation.why_not or self.why_not
            raise NotCleanError(why or self._points.why_dirty)
        with self._beside_training():
            self.prove(found)
        self._held = found
        return found.number

    def write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        """See `StateWriter`."""
        assert self._held is not None
        assert self._held.number == point
        return self.write_at(self._held, kept, directory)

    def prove(self, point: CleanPoint) -> None:
        """
        Raises:
            NotCleanError: the state isn't the point's, or a restart couldn't continue from there.
        """
        self._continuation.expect_possible(point)
        self._expect_unchanged(point)
        self._continuation.expect_nothing_carried(point)

    def write_at(
        self, point: CleanPoint, kept: Mapping[int, Sequence[KeptState]], directory: Path
    ) -> Place:
        """Write the state at a point; see `StateWriter.write`."""
        with self._beside_training():
            return self._write(point, kept, directory)

    def _beside_training(self) -> AbstractContextManager[None]:
        """Have this thread not wait for what the training has queued on a GPU."""
        return nullcontext() if self._live.gpu is None else self._live.gpu.aside()

    def _expect_unchanged(self, point: CleanPoint) -> None:
        queued = self._points.versions_after(point)
        self._live.expect_unchanged(point.versions, point.sample, last=queued)

    def _write(
        self, point: CleanPoint, kept: Mapping[int, Sequence[KeptState]], directory: Path
    ) -> Place:
        assert self.kept is not None
        copies = self._live.copies(point.on_cpu)
        self._points.expect_gpu_at(point)
        # Since the agent has read this rank's, it may have reached another point.
        kept = {**kept, dist.get_rank(): self.kept.read()}
        if self._depot is not None:
            # The agents of those that have nothing are lost with their hosts.
            kept = {rank: states or self._depot.read(rank) for rank, states in kept.items()}
        held, (point, states) = point, self._known(point, kept)
        if len({state["sample"] for state, _ in states}) > 1:
            raise NotCleanError("its parameters differ between the ranks")
        self._live.expect_usable([buffers for _, buffers in states], copies)
        by_rank = [self._live.whole(state, buffers, copies) for state, buffers in states]
        differing = differences_of([digests_of(self._live.compared(whole)) for whole in by_rank])
        for rank, (state, _) in enumerate(states):
            torch.save(restorable(state["random"]), directory / randomness.file_of(rank))
            if state["places"]:
                save_safely(state["places"], directory / stream_places.file_of(rank))
            write_own(by_rank[rank], differing, directory, rank)
        self._files(directory, by_rank[0], differing, point.of_library)
        # A write meanwhile would have torn the files.
        self._expect_unchanged(point)
        return replace(point.place, is_earlier=point.place.step < held.place.step)

    def _known(
        self, point: CleanPoint, kept: Mapping[int, Sequence[KeptState]]
    ) -> tuple[CleanPoint, Sequence[SmallState]]:
        """Return the newest point at which all ranks' small states are known, and these.

        What a lost rank had at this point may not be known. An earlier one after the same step has
        the same parameters: a restart does again what came between.

        Raises:
            NotCleanError: there is none.
        """
        why = None
        for each in (point, *self._points.before(point)):
            ranks = KeptByRank(
                kept,
                first=each.first,
                point=each.number,
                mine=dist.get_rank(),
                buffers=self._live.buffers,
                sent=self._live.sent,
                by_forward=self._live.changed_by_forward(),
                are_alike=virtual_workers() is not None,
                needs_own=self._needs_own,
                gpu_bytes=0 if self._live.gpu_buffers is None else self._live.gpu_buffers.size,
            )
            try:
                self._continuation.expect_possible(each)
                return each, [ranks.state(rank) for rank in range(get_context().get_world_size())]
            except NotCleanError as error:
                why = why or error
        assert why is not None
        raise why
