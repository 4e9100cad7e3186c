"""Keeps this rank's state at each clean point, and writes it after a loss of another rank.

A clean point is the first fetch of a batch after a step, or a report of `TrainingState`, or where a
library's trainer may save. From there until the next `optimizer.step` the parameters stay what they
are, so nothing large is copied. The rest is, each time: buffers, random numbers, places in data,
and what other parts hold. A small forecast follows each forward pass, before the gradients meet
those of other ranks: it stands for the point that a rank didn't reach any more.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polytrain import get_context
from polytrain.extension import KeptState, KeptStates, NotCleanError, Place, Survivor, survivor
from polytrain_torch import randomness
from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    differences_of,
    digests_of,
    write_own,
)
from polytrain_torch.checkpoints.safe_serialization import save_safely
from polytrain_torch.checkpoints.shard_copies import write_part, write_replica
from polytrain_torch.checkpoints.state_files import write_state
from polytrain_torch.loaders import stream_places
from polytrain_torch.models.parallel import after_forward
from polytrain_torch.survivors import points
from polytrain_torch.survivors.byte_code import instruction_of
from polytrain_torch.survivors.depot import depot
from polytrain_torch.survivors.generators import Generators, restorable
from polytrain_torch.survivors.gpu_copies import key_of
from polytrain_torch.survivors.gpu_points import GpuPoints
from polytrain_torch.survivors.kept_by_rank import LENGTHS, KeptByRank, State
from polytrain_torch.survivors.live_parts import LiveParts, OnCpu
from polytrain_torch.survivors.loop_variables import Frames, Loop, fetch_of_step, frames_from
from polytrain_torch.virtual_workers import current as virtual_workers

logger = logging.getLogger(__name__)

_MOST_SMALL = 16 << 20
"""Bytes that may be copied at each point."""

_ROOM = 1 << 20
"""Bytes for a small state to grow. On CPUs the memory is taken only once they are written."""

_SETTLED_S = 0.02
"""A training that has stood still for so long at a point waits for the lost rank."""

_STUCK_S = 0.2
"""On a GPU, so long may the gradients of a step take that only this rank has queued."""

_NAP_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What is known of a clean point beside the small state."""

    number: int
    first: int
    """Number of the first point after the same step."""

    place: Place
    versions: Sequence[int]
    """The version of each parameter: it changes with every write."""

    frames: Frames | None
    """The loop's; None at a report and in a library's loop, which can continue there."""

    progress: Mapping[str, Any]
    is_over: bool = False
    """Whether the epoch had no batch left."""

    sample: bytes | torch.Tensor | None = None
    """Of the parameters, where an evaluation may swap them; None elsewhere."""

    of_library: Any = None
    """What a library's trainer knows here; None in the user's own loop."""

    on_cpu: OnCpu = ()
    """With parameters on a GPU, what of the optimizers' states is on the CPU."""


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


class Keeper:
    """The `StateWriter` of one attempt's `TrainingState`, or of a library's trainer."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        progress: Mapping[str, Any],
        *,
        files: Files = write_files,
        whose: str = "TrainingState",
        around: Sequence[Any] = (),
        by_batch: bool = True,
        carried: Callable[[], str | None] = lambda: None,
        needs_own: bool = False,
    ) -> None:
        """
        Args:
            parts: the parts of the training state, which are restored.
            progress: what the loop knows of its own progress.
            files: writes a checkpoint's files.
            whose: what has the parts, for messages.
            around: a library's objects around the parts, which rebuild themselves.
            by_batch: whether the points are where loaders fetch batches.
            carried: returns what has changed beside the parts, and a restart wouldn't find; None
                if nothing.
            needs_own: whether what a lost rank had alone must be known, and not another one's.
        """
        self.progress = progress
        self._files = files
        self._whose = whose
        self._around = around
        self.by_batch = by_batch
        self._carried = carried
        self._needs_own = needs_own
        self._notes_steps = True
        """Whether torch's hook tells when an optimizer is about to change the parameters."""

        self._own: State = {}
        """What a library's trainer has on this rank alone, as plain values."""

        self._survivor: Survivor = survivor()
        self._reads_before = self._survivor.reads_checkpoint
        self._lock = threading.Lock()
        self._has_stepped = False
        self._has_gone_forward = False
        """Whether a model has been trained on a batch since the last step."""

        self._has_warned = False
        self._is_dirty = True
        self._is_held = False
        self._number = 0
        self._point: _Point | None = None
        self._written: _Point | None = None
        """The point whose state is written. The training may pass others meanwhile."""

        self._kept: KeptStates | None = None
        """The memory for small states; None if no other rank could hand on what this one has."""

        self._depot = depot()
        """Takes the small states to another host; None if there is none."""

        self._has_begun = False
        self.steps = 0
        """Number of the optimizers' steps in this attempt."""

        self.why_elsewhere = "it gets its batches from elsewhere"
        """Why a loop can't be continued whose batches come from no loader with a place."""

        self._loop: Loop | None = None
        self._frames: Frames = ()
        self._fetches: dict[tuple[CodeType, int], Frames] = {}
        """Where batches were fetched before the first step: looks, evaluations, the training."""

        self._foreign = ""
        """What has been found that a checkpoint wouldn't hold; empty if nothing."""

        self._why_not: str | None = None
        self._live = LiveParts(parts)
        self._generators = Generators()
        self._gpu_points: GpuPoints[_Point] | None = None
        """Which point the GPU is at; None if the parameters are on the CPU."""

        self._size = 0
        """Bytes of the whole state, when it was first kept."""

    @property
    def keeps(self) -> bool:
        """Whether nothing has kept it from keeping states so far."""
        return self._why_not is None

    # Called by the training

    @contextmanager
    def noting_steps_itself(self) -> Iterator[None]:
        """In a block, leave it to a library to call `before_step`.

        An optimizer's step may begin with the forward pass, by a function that it gets.
        """
        self._notes_steps = False
        try:
            yield
        finally:
            self._notes_steps = True

    def begins_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's step begins."""
        if self._notes_steps:
            self.before_step(optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to change the parameters; hold it if the state is."""
        self._has_gone_forward = False
        self.steps += 1
        with self._lock:
            is_held = self._is_held
            if not is_held:
                self._is_dirty = self._has_stepped = True
                self._leave_point()
        if is_held:
            # The agent kills this process: its state belongs to the next attempt.
            threading.Event().wait()
        if self._why_not is not None:
            return
        if self._loop is None and self.by_batch and not self._foreign:
            try:
                self._see_loop()
            except Exception as error:  # variables and states may be anything
                why = f"{type(error).__name__}: {error}"
                self._foreign = f"its variables can't be looked at: {why}"
        if not self._foreign and optimizer not in self._live.optimizers.values():
            self._foreign = f"an optimizer that steps isn't in {self._whose}"

    def _leave_point(self) -> None:
        if self._gpu_points is not None:
            try:
                self._gpu_points.leave(self._live.versions())
            except Exception as error:  # the training continues
                # Nobody would see that the GPU leaves the point.
                self.refuse(str(error))

    def before_batch(self, frame: FrameType | None) -> None:
        """Note that the loop is about to get its next batch."""
        if self._why_not is not None:
            return
        if frame is not None and self._loop is None and not self._foreign:
            self._fetches[frame.f_code, instruction_of(frame)] = frames_from(frame)
        if self._has_stepped or not self._frames:
            if (
                not self._frames
                or self._frames[0][0] is not frame
                or instruction_of(frame) != self._frames[0][1]
            ):
                self._frames = frames_from(frame)
            self._pass(frames=self._frames)

    def has_batch(self) -> None:
        """Note that the loop gets its next batch."""
        if self._survivor.copies is not None:
            self._survivor.copies.confirm()

    def epoch_is_over(self) -> None:
        """Note that there was no batch left."""
        point = self._point
        if point is None or point.frames is None or point.is_over or self._has_stepped:
            return
        try:
            point = replace(point, is_over=True, sample=self._live.sample())
            with self._lock:
                self._point = point
                if self._gpu_points is not None:
                    self._gpu_points.amend(point)
        except Exception as error:  # a GPU that can't take it; the training continues
            self.refuse(str(error))
            return
        if self._survivor.copies is not None and self._survivor.copies.is_unconfirmed:
            try:
                self._prove(point)
            except Exception as error:  # variables may be anything
                self._survivor.copies.withdraw(str(error))
            else:
                self._survivor.copies.confirm()

    def at_report(self, metrics: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Note that the loop reports, with its progress: a restart can continue after that.

        It can't in the middle of an accumulation, whose gradients nothing keeps.
        """
        self.progress = progress
        if self.accumulates():
            self._warn_of_gradients()
        elif self._why_not is None and self._has_begun:
            self._pass(frames=None, reported=metrics)

    def at_end_of_step(
        self,
        of_library: Any,
        own: State,
        *,
        reported: Mapping[str, Any] | None = None,
        is_sampled: bool,
        is_ahead: bool = False,
    ) -> None:
        """Note that a library's trainer is where it may save: a restart can continue from there.

        Args:
            of_library: what it knows there; it doesn't change any more.
            own: what it has on this rank alone, as plain values.
            reported: the metrics of the report that it makes here, with a checkpoint.
            is_sampled: whether an evaluation that comes may swap the weights.
            is_ahead: whether the state has more than a checkpoint of the last report.
        """
        self._own = own
        if self._why_not is None:
            self._pass(
                frames=None,
                reported=reported,
                of_library=of_library,
                is_sampled=is_sampled,
                is_ahead=is_ahead,
            )

    def expect_step(self) -> None:
        """Note the end of a step, in which an optimizer must have stepped."""
        if not self._has_stepped:
            self.refuse("its optimizer's steps can't be seen")

    def refuse(self, why: str) -> None:
        """Note that a checkpoint can't hold the state from here on."""
        self._foreign = self._foreign or why

    def after_forward(self, own: State | None = None) -> None:
        """Keep a forecast of the next point: what a rank can't be asked any more if it is lost.

        Args:
            own: what it will have on this rank alone, if that is known.
        """
        self._has_gone_forward = True
        # What virtual workers end their step with is every rank's own knowledge.
        if self._kept is not None and self._why_not is None and virtual_workers() is None:
            try:
                self._put({"own": own} if own else {}, point=self._number + 1, is_forecast=True)
            except Exception as error:  # a GPU that can't take it; the training continues
                self._why_not = f"{type(error).__name__}: {error}"

    def accumulates(self) -> bool:
        """Return whether there are gradients that no optimizer has used."""
        return self._has_gone_forward and self._live.have_gradients()

    def _warn_of_gradients(self) -> None:
        if not self._has_warned and get_context().get_world_rank() == 0:
            logger.warning(
                "A report comes between backward() and the optimizer's step: its checkpoint "
                "doesn't have the gradients so far, and a restart from it loses them. Report after "
                "the step, once for all batches whose gradients it adds up."
            )
        self._has_warned = True

    def _pass(
        self,
        *,
        frames: Frames | None,
        reported: Mapping[str, Any] | None = None,
        of_library: Any = None,
        is_sampled: bool = True,
        is_ahead: bool = False,
    ) -> None:
        """Keep this rank's small state at a clean point. The training continues if it can't."""
        try:
            if not self._has_begun:
                self._why_not = self._begin()
            if self._why_not is None:
                self._keep(
                    frames,
                    reported,
                    of_library,
                    is_sampled=is_sampled and frames is None,
                    is_ahead=is_ahead,
                )
        except Exception as error:  # a part's state may be anything
            self._why_not = f"{type(error).__name__}: {error}"
        if self._why_not is not None and not self._has_begun:
            self._survivor.keep_nothing(self._why_not)
        if self._why_not is not None and self._survivor.copies is not None:
            self._survivor.copies.refuse(self._why_not)

    def _keep(
        self,
        frames: Frames | None,
        reported: Mapping[str, Any] | None,
        of_library: Any,
        *,
        is_sampled: bool,
        is_ahead: bool,
    ) -> None:
        place, last = self._survivor.place(), self._point
        if reported is not None:
            place = place.after_report(reported)
        elif last is not None and last.place.step == place.step:
            place = replace(place, is_ahead=self._has_stepped or last.place.is_ahead)
        if is_ahead:
            place = replace(place, is_ahead=True)
        self._live.large()  # `expect_unchanged` compares with these.
        number = self._number + 1
        if self._kept is not None and not self._put(self._small(), point=number, is_forecast=False):
            self._foreign = "its small parts have grown"
        point = _Point(
            number=number,
            first=number if self._has_stepped or last is None else last.first,
            place=place,
            versions=self._live.versions(),
            frames=frames,
            progress=self.progress,
            sample=self._live.sample() if is_sampled else None,
            of_library=of_library,
            on_cpu=self._live.on_cpu() if self._gpu_points is not None else (),
        )
        if self._gpu_points is not None:
            self._gpu_points.wait()
        with self._lock:
            has_stepped = self._has_stepped
            if self._gpu_points is not None:
                self._gpu_points.reach(point)
            self._number, self._point = number, point
            self._is_dirty = self._has_stepped = False
        if has_stepped and self._survivor.copies is not None:
            step = self.steps if self._live.is_sharded or self._copies_replicas else None
            has_large = self._live.is_sharded or dist.get_rank() == 0
            size = self._size if has_large else 0
            # After an epoch's last batch the loop may have what a restart wouldn't find.
            self._survivor.copies.step(
                self._copy, number=step, size=size, is_confirmed=frames is None
            )

    @property
    def _copies_replicas(self) -> bool:
        """Whether ranks that have the same weights copy them, for a loss of all at once."""
        are_equal = dist.get_world_size() > 1 and not self._live.compares
        # A library's trainer writes files of its own.
        return are_equal and self._files is write_files

    def _copy(self, directory: Path) -> Place:
        assert self._point is not None
        self._written = self._point
        live = self._live
        if live.gpu_queue is not None:
            live.gpu_queue.wait()
        self._prove(self._point)
        if live.is_sharded:
            live.expect_finite([live.buffers], {})
            write_part(directory, live.parts, progress=self._point.progress)
        elif dist.get_world_size() > 1:
            copies = live.copies(self._point.on_cpu, with_buffers=True)
            buffers = [copies.get(key_of(each), each) for each in live.buffers]
            live.expect_finite([buffers], copies, with_large=dist.get_rank() == 0)
            whole = live.whole(self._small(), buffers, copies)
            changes = [*live.modules, *live.optimizers]
            write_replica(directory, whole, live.compared(whole), changes=changes)
        else:
            return self.write({}, self._point.number, directory)
        live.expect_unchanged(self._point.versions, self._point.sample)
        return self._point.place

    def _put(self, small: State, *, point: int, is_forecast: bool) -> bool:
        assert self._kept is not None
        pieces = [*self._generators.states(), pickle.dumps(small, protocol=5) if small else b""]
        views = b"".join(self._live.views)
        by_gpu = self._live.gpu_buffers
        room = by_gpu.room() if by_gpu is not None else b""
        content = [room + LENGTHS.pack(*map(len, pieces)), *pieces, views]
        has_room = self._kept.put(content, point=point, is_forecast=is_forecast)
        if has_room and by_gpu is not None:
            by_gpu.fill(self._kept.newest_at)
        if has_room and self._depot is not None:
            alone = [*pieces[:-1], views]
            self._depot.put(point, content, is_forecast=is_forecast, alone=alone)
        return has_room

    def _begin(self) -> str | None:
        """Start to keep states; return the reason if that isn't possible."""
        if not self._survivor.can_keep:
            return "this run has no agent"
        # A library's trainer writes files of its own.
        is_ours = self._files is write_files
        copies_shards = self._survivor.copies is not None and is_ours
        live = self._live
        why_not = live.begin(whose=self._whose, copies_shards=copies_shards, copies_gpu=is_ours)
        if why_not is not None:
            return why_not
        pieces = [*self._generators.states(), pickle.dumps(self._small(), protocol=5)]
        by_gpu = live.gpu_buffers
        size = sum(map(len, (*pieces, *live.views))) + (0 if by_gpu is None else by_gpu.size)
        self._size = size + live.large_bytes()
        if live.gpu_queue is not None:
            self._gpu_points = GpuPoints(live.gpu_queue.mark)
        if live.is_sharded:
            self._size *= get_context().get_local_world_size()
        elif size > _MOST_SMALL:
            return f"its buffers and small parts have {size / 1e6:.0f} MB"
        else:
            self._kept = self._survivor.keep(self, capacity=size * 2 + _ROOM, size=self._size)
            if by_gpu is not None:
                by_gpu.share(self._kept)
        self._has_begun = True
        return None

    def _small(self) -> State:
        return {
            **self._live.small(),
            "places": stream_places.states(),
            "progress": dict(self.progress),
            "own": self._own,
        }

    def _see_loop(self) -> None:
        found = fetch_of_step(self._fetches.values())
        self._fetches.clear()
        if found is None:
            self._foreign = self.why_elsewhere
            return
        self._frames = found
        known = [self, *self._around, *self._live.objects()]
        self._loop = Loop(self._frames, known)

    # Called by the survivor's thread

    def hold(self, point: int, has_time: Callable[[], bool]) -> int:
        """See `StateWriter`."""
        seen, since = -1, time.monotonic()
        while True:
            with self._lock:
                point_now = self._clean_point()
                number = -1 if point_now is None else point_now.number
                if number != seen:
                    seen, since = number, time.monotonic()
                stands = time.monotonic() - since
                is_stuck = self._gpu_points is not None and stands > _STUCK_S
                has_settled = (number >= point and stands > _SETTLED_S) or is_stuck
                if number >= 0 and (has_settled or not has_time()):
                    self._is_held = True
                    self._written = found = point_now
                    break
            if not has_time():
                why = self._foreign or self._why_not
                raise NotCleanError(why or "it was inside of an optimizer's step")
            time.sleep(_NAP_S)
        assert found is not None
        with self._beside_training():
            self._prove(found)
        return found.number

    def _clean_point(self) -> _Point | None:
        """Return the point whose state there is; None during an optimizer's step."""
        if self._gpu_points is not None:
            return self._gpu_points.current()
        return None if self._is_dirty else self._point

    def _beside_training(self) -> AbstractContextManager[None]:
        """Have this thread not wait for what the training has queued on a GPU."""
        return nullcontext() if self._live.gpu is None else self._live.gpu.aside()

    def _prove(self, point: _Point) -> None:
        """
        Raises:
            NotCleanError: the state isn't the point's, or a restart couldn't continue from there.
        """
        if point.number == 1:
            raise NotCleanError("it has taken no step since it started")
        if self._foreign:
            raise NotCleanError(self._foreign)
        if self._survivor.reads_checkpoint != self._reads_before:
            raise NotCleanError("the training function reads its checkpoint itself")
        self._expect_unchanged(point)
        carried = self._carried()
        if carried is not None:
            raise NotCleanError(carried)
        if point.frames is not None:
            if self._loop is None or not self._loop.frames:
                carried = "its loop isn't known"
            else:
                carried = self._loop.carried(
                    point.frames, point.progress, has_batch=not point.is_over
                )
            if carried is not None:
                raise NotCleanError(carried)

    def _expect_unchanged(self, point: _Point) -> None:
        with self._lock:
            queued = self._gpu_points.versions_after(point.number) if self._gpu_points else None
        self._live.expect_unchanged(point.versions, point.sample, last=queued)

    def write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        """See `StateWriter`."""
        with self._beside_training():
            return self._write(kept, point, directory)

    def _write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        mine = dist.get_rank()
        found = self._written
        assert found is not None
        assert self._kept is not None
        copies = self._live.copies(found.on_cpu)
        with self._lock:
            now = self._clean_point()
            if self._gpu_points is not None and (now is None or now.number != found.number):
                raise NotCleanError("its GPU began the next step while its state was copied")
        # Since the agent has read this rank's, it may have reached another point.
        kept = {**kept, mine: self._kept.read()}
        if self._depot is not None:
            # The agents of those that have nothing are lost with their hosts.
            kept = {rank: states or self._depot.read(rank) for rank, states in kept.items()}
        ranks = KeptByRank(
            kept,
            first=found.first,
            point=point,
            mine=mine,
            buffers=self._live.buffers,
            sent=self._live.sent,
            by_forward=self._live.changed_by_forward(),
            are_alike=virtual_workers() is not None,
            needs_own=self._needs_own,
            gpu_bytes=0 if self._live.gpu_buffers is None else self._live.gpu_buffers.size,
        )
        states = [ranks.state(rank) for rank in range(get_context().get_world_size())]
        if len({state["sample"] for state, _ in states}) > 1:
            raise NotCleanError("its parameters differ between the ranks")
        self._live.expect_finite([buffers for _, buffers in states], copies)
        by_rank = [self._live.whole(state, buffers, copies) for state, buffers in states]
        differing = differences_of([digests_of(self._live.compared(whole)) for whole in by_rank])
        for rank, (state, _) in enumerate(states):
            torch.save(restorable(state["random"]), directory / randomness.file_of(rank))
            if state["places"]:
                save_safely(state["places"], directory / stream_places.file_of(rank))
            write_own(by_rank[rank], differing, directory, rank)
        self._files(directory, by_rank[0], differing, found.of_library)
        # A write meanwhile would have torn the files.
        self._expect_unchanged(found)
        return found.place


_current: tuple[Any, Keeper] | None = None
"""The attempt's context, and its keeper."""

_has_hooks = False


def start(keeps: Keeper) -> Keeper:
    """Start to keep the state of an attempt, whose parts are restored; of a second one, nothing."""
    global _current, _has_hooks
    if not _has_hooks:
        _has_hooks = True
        register_optimizer_step_pre_hook(_before_step)
        after_forward.append(_after_forward)
    context = get_context()
    if _current is not None and _current[0] is context:
        keeps.refuse("another state was restored before it")
    _current = context, keeps
    points.listener = keeps if keeps.by_batch else None
    return keeps


def keeper() -> Keeper | None:
    """Return this attempt's keeper; None if no `TrainingState` was restored."""
    return None if _current is None else _current[1]


def unnoted_steps() -> AbstractContextManager[None]:
    """Have this attempt's keeper take no notice of optimizers' steps in a block."""
    keeps = keeper()
    return nullcontext() if keeps is None else keeps.noting_steps_itself()


def _before_step(optimizer: Any, *_: Any) -> None:
    if _current is not None:
        _current[1].begins_step(optimizer)


def _after_forward() -> None:
    if _current is not None:
        _current[1].after_forward()
