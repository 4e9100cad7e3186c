"""Keeps this rank's state at each clean point, for other ranks after a loss.

Parameters aren't copied there, but what is small and changes with each step: buffers, random
numbers, places in data, and what other parts hold. A small forecast follows each forward pass,
before the gradients meet those of other ranks: it stands for the point that a rank didn't reach any
more.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from polytrain import ValidationTaskConfig, get_context
from polytrain.extension import KeptStates, Place, Survivor, survivor
from polytrain_torch.checkpoints.shard_copies import write_part, write_replica
from polytrain_torch.loaders import stream_places
from polytrain_torch.models.parallel import after_forward
from polytrain_torch.private import replace_backward_engine
from polytrain_torch.survivors import points
from polytrain_torch.survivors.byte_code import instruction_of
from polytrain_torch.survivors.clean_points import CleanPoint, CleanPoints
from polytrain_torch.survivors.continuation import Continuation
from polytrain_torch.survivors.depot import depot
from polytrain_torch.survivors.generators import Generators
from polytrain_torch.survivors.gpu_copies import key_of
from polytrain_torch.survivors.gpu_points import GpuPoints
from polytrain_torch.survivors.kept_by_rank import LENGTHS, State
from polytrain_torch.survivors.live_parts import LiveParts
from polytrain_torch.survivors.loop_variables import Frames
from polytrain_torch.survivors.point_writer import Files, PointWriter, write_files
from polytrain_torch.survivors.unused_gradients import LACKS_GRADIENTS, UnusedGradients
from polytrain_torch.virtual_workers import current as virtual_workers

logger = logging.getLogger(__name__)

_MOST_SMALL = 16 << 20
"""Bytes that may be copied at each point."""

_ROOM = 1 << 20
"""Bytes for a small state to grow. On CPUs the memory is taken only once they are written."""


class Keeper:
    """Keeps the states of one attempt's `TrainingState`, or of a library's trainer."""

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
        self._whose = whose
        self.by_batch = by_batch
        self._is_ours = files is write_files
        """Whether a checkpoint's files are those of a `TrainingState`."""

        self._notes_steps = True
        """Whether torch's hook tells when an optimizer is about to change the parameters."""

        self._own: State = {}
        """What a library's trainer has on this rank alone, as plain values."""

        self._may_be_whole = True
        """Whether a restart would have found the variables at the end of each epoch so far."""

        self._fetched: dict[tuple[CodeType, int], int] = {}
        """Where batches are fetched, and the number of backward passes before the last of each."""

        self._several: set[tuple[CodeType, int]] = set()
        """Where some were fetched without a backward pass between: another loader may have none."""

        self._fetches_for_several = False
        self._has_warned = False
        self._has_begun = False
        self._is_at_fetch = False
        """Whether the last fetch of a batch is the last point."""

        self._forwards = 0
        """Number of forward passes since the last point."""

        self.steps = 0
        """Number of the optimizers' steps in this attempt."""

        self._survivor: Survivor = survivor()
        self._live = LiveParts(parts)
        self.gradients = UnusedGradients(
            self._live.optimizers.values(), are_held=self._live.fsdp_holds_gradients
        )
        """Tells whether some wait for a step."""

        self._generators = Generators()
        self._points = CleanPoints()
        self.continuation = Continuation(
            self._survivor,
            known=lambda: [self, *around, *self._live.objects()],
            carried=carried,
        )
        self._depot = depot()
        """Takes the small states to another host; None if there is none."""

        self._writer = PointWriter(
            self._live,
            self._points,
            self.continuation,
            files=files,
            depot=self._depot,
            needs_own=needs_own,
        )
        self._kept: KeptStates | None = None
        """The memory for small states; None if no other rank could hand on what this one has."""

        self._size = 0
        """Bytes of the whole state, when it was first kept."""

    @property
    def keeps(self) -> bool:
        """Whether nothing has kept it from keeping states so far."""
        return self._writer.why_not is None

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
        self.steps += 1
        if self._is_captured():
            return
        try:
            self._points.leave(self._live.versions)
        except Exception as error:  # the training continues
            self.refuse(str(error))
        if not self.keeps:
            return
        if self._survivor.copies is not None:
            # There was a batch of all loaders.
            self._survivor.copies.confirm()
        if self.by_batch:
            self.continuation.see_loop(self._points.next_number)
        if optimizer not in self._live.optimizers.values():
            self.refuse(f"an optimizer that steps isn't in {self._whose}")
        if self._live.has_local_gradients(optimizer):
            self.refuse("the gradients of a step were each rank's own, by no_sync()")

    def before_batch(self, frame: FrameType | None) -> None:
        """Note that the loop is about to get its next batch."""
        self._is_at_fetch = False
        if not self.keeps:
            return
        self.continuation.fetch(frame)
        if self._survivor.copies is not None and frame is not None:
            self._see_fetch((frame.f_code, instruction_of(frame)))
        if not self._points.has_stepped and self.continuation.has_fetched:
            return
        frames = self.continuation.frames_at(frame)
        waits = self.lacks_gradients(reads_values=False)
        if waits:
            # A restart would begin with the next batch, without them.
            self._points.why_dirty = "it had gradients that its next step was to use"
        # The loop may have dropped gradients that the GPU hasn't used yet.
        if waits and self._live.gpu is not None:
            return
        if self.continuation.is_elsewhere(frames):
            # It may evaluate: then the loop's own fetch comes next.
            self._points.why_dirty = "it gets batches in several places"
        else:
            self._pass(partial(self._keep, frames, is_open=waits))
            self._is_at_fetch = True

    def _see_fetch(self, place: tuple[CodeType, int]) -> None:
        """Note where a batch is fetched: `zip` does so from several loaders before a step."""
        if self._fetched.get(place) == self.gradients.passes:
            self._several.add(place)
        self._fetched[place] = self.gradients.passes
        self._fetches_for_several = place in self._several

    def has_batch(self) -> None:
        """Note that the loop gets its next batch."""
        if self._survivor.copies is not None and not self._fetches_for_several:
            self._survivor.copies.confirm()

    def epoch_is_over(self) -> None:
        """Note that there was no batch left."""
        # The next epoch's first one is fetched at the same place.
        self._fetched.clear()
        point = self._points.last
        # An evaluation before a step, or a rest of batches without one, ends after another point.
        if point is None or not self._is_at_fetch:
            return
        try:
            point = replace(point, is_over=True)
            point = replace(point, is_whole=self._is_whole(point))
            self._points.amend(point)
        except Exception as error:  # a GPU that can't take it; the training continues
            self.refuse(str(error))
            return
        if self._survivor.copies is not None and self._survivor.copies.is_unconfirmed:
            try:
                self._writer.prove(point)
            except Exception as error:  # variables may be anything
                self._survivor.copies.withdraw(str(error))
            else:
                self._survivor.copies.confirm()

    def _is_whole(self, point: CleanPoint) -> bool:
        """Return whether a restart would find the loop's variables, of which none has changed yet.

        An evaluation may follow, after whose end less is known of a rank that is lost in it.
        """
        asks = self._kept is not None and get_context().get_world_size() > 1
        shows = self.continuation.is_of_loop(point) and self.continuation.shows_carried(point)
        if not (self._may_be_whole and asks and shows):
            return False
        try:
            self.continuation.expect_nothing_carried(point)
        except Exception:  # variables may be anything
            # Those that change do so in each epoch, and looking takes milliseconds.
            self._may_be_whole = False
        return self._may_be_whole

    def at_report(
        self,
        metrics: Mapping[str, Any],
        progress: Mapping[str, Any],
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        """Note that the loop reports, with its progress: a restart can continue after that.

        It can't in the middle of an accumulation, whose gradients nothing keeps.

        Args:
            metrics: what it reports.
            progress: what `restore` would return.
            validation: whether the report requests a validation.
        """
        self.progress = progress
        self._live.note_groups()
        if self.lacks_gradients():
            self._warn_of_gradients()
        elif self.keeps and self._has_begun:
            self._pass(partial(self._keep, None, reported=metrics, validation=validation))

    def at_end_of_step(
        self,
        of_library: Any,
        own: State,
        *,
        reported: Mapping[str, Any] | None = None,
        is_ahead: bool = False,
    ) -> None:
        """Note that a library's trainer is where it may save: a restart can continue from there.

        Args:
            of_library: what it knows there; it doesn't change any more.
            own: what it has on this rank alone, as plain values.
            reported: the metrics of the report that it makes here, with a checkpoint.
            is_ahead: whether the state has more than a checkpoint of the last report.
        """
        self._own = own
        if self.keeps:
            keep = partial(
                self._keep,
                None,
                reported=reported,
                of_library=of_library,
                is_ahead=is_ahead,
            )
            self._pass(keep)

    def expect_step(self) -> None:
        """Note the end of a step, in which an optimizer must have stepped."""
        if not self._points.has_stepped:
            self.refuse("its optimizer's steps can't be seen")

    def lacks_gradients(self, *, reads_values: bool = True) -> bool:
        """Return whether a checkpoint would lack gradients; see `UnusedGradients.exist`."""
        return bool(self._look_at_gradients(self.gradients.exist, reads_values=reads_values))

    def before_backward(self) -> None:
        """Note that a backward pass begins."""
        self._is_captured()
        self._live.note_local_gradients()
        self._look_at_gradients(self.gradients.computed)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of an optimizer's step."""
        self._look_at_gradients(self.gradients.used_by, optimizer)

    def _look_at_gradients(self, look: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return look(*args, **options)
        except Exception as error:  # they may be anything; the training continues
            self.refuse(f"its gradients can't be looked at: {type(error).__name__}: {error}")

    def _is_captured(self) -> bool:
        """Return whether a CUDA graph captures what the training does, and refuse that."""
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if is_captured:
            self.refuse("a CUDA graph has captured a step, which can't be seen when it is replayed")
        return is_captured

    def refuse(self, why: str) -> None:
        """Note that a checkpoint can't hold the state from here on."""
        self.continuation.refuse(why)

    def after_forward(self, own: State | None = None) -> None:
        """Keep a forecast of the next point: what a rank can't be asked any more if it is lost.

        Args:
            own: what it will have on this rank alone, if that is known.
        """
        self._forwards += 1
        if self._is_captured():
            return
        # What virtual workers end their step with is every rank's own knowledge.
        if self._kept is not None and self.keeps and virtual_workers() is None:
            try:
                with_own = {"forwards": self._forwards, "own": own}
                forecast = pickle.dumps(with_own, protocol=5) if own else _forecast(self._forwards)
                self._put(forecast, point=self._points.next_number, is_forecast=True)
            except Exception as error:  # a GPU that can't take it; the training continues
                self._writer.why_not = f"{type(error).__name__}: {error}"

    def _warn_of_gradients(self) -> None:
        if not self._has_warned and get_context().get_world_rank() == 0:
            logger.warning("%s", LACKS_GRADIENTS)
        self._has_warned = True

    def _pass(self, keep: Callable[[], None]) -> None:
        """Keep this rank's small state at a clean point. The training continues if it can't."""
        why_not = None
        try:
            if not self._has_begun:
                why_not = self._begin()
            if why_not is None:
                keep()
        except Exception as error:  # a part's state may be anything
            why_not = f"{type(error).__name__}: {error}"
        if why_not is None:
            return
        self._writer.why_not = why_not
        if not self._has_begun:
            self._survivor.keep_nothing(why_not)
        if self._survivor.copies is not None:
            self._survivor.copies.refuse(why_not)

    def _keep(
        self,
        frames: Frames | None,
        *,
        reported: Mapping[str, Any] | None = None,
        validation: bool | ValidationTaskConfig = False,
        of_library: Any = None,
        is_ahead: bool = False,
        is_open: bool = False,
    ) -> None:
        place, last = self._survivor.place(), self._points.last
        has_stepped = self._points.has_stepped
        if reported is not None:
            place = place.after_report(reported, validation)
        elif last is not None and last.place.step == place.step:
            place.is_ahead = has_stepped or last.place.is_ahead
        place.is_ahead |= is_ahead
        if has_stepped:
            # All ranks come here, also if one of them doesn't copy.
            self._live.reshard()
        self._live.large()  # `expect_unchanged` compares with these.
        number = self._points.next_number
        if self._kept is not None and not self._put(
            pickle.dumps(self._small(), protocol=5), point=number, is_forecast=False
        ):
            self.refuse("its small parts have grown")
        point = CleanPoint(
            number=number,
            first=number if has_stepped or last is None else last.first,
            place=place,
            versions=self._live.versions(),
            frames=frames,
            progress=self.progress,
            sample=self._live.sample() if self._is_asked_later else None,
            of_library=of_library,
            on_cpu=self._live.on_cpu() if self._live.gpu is not None else (),
        )
        self._forwards = 0
        proves_clean = self.gradients.dropped_later() if is_open else lambda: True
        is_new = self._points.reach(point, proves_clean)
        if not is_open:
            self.gradients.passed()
        self.continuation.pass_point(point)
        copies = self._survivor.copies
        if copies is not None and is_new and not is_open and self.continuation.shows_carried(point):
            step = self.steps if self._live.is_sharded or self._copies_replicas else None
            has_large = self._live.is_sharded or dist.get_rank() == 0
            size = self._size if has_large else 0
            # After an epoch's last batch the loop may have what a restart wouldn't find.
            copies.step(self._copy, number=step, size=size, is_confirmed=frames is None)

    @property
    def _is_asked_later(self) -> bool:
        """Whether the driver may ask for a point's state, and not only get a copy of it."""
        has_copies = self._survivor.copies is not None
        return self._kept is not None and (not has_copies or get_context().get_world_size() > 1)

    @property
    def _copies_replicas(self) -> bool:
        """Whether ranks that have the same weights copy them, for a loss of all at once."""
        are_equal = dist.get_world_size() > 1 and not self._live.compares
        # A library's trainer writes files of its own.
        return are_equal and self._is_ours

    def _copy(self, directory: Path) -> Place:
        point = self._points.last
        assert point is not None
        live = self._live
        if live.gpu_queue is not None:
            live.gpu_queue.wait()
        self._writer.prove(point)
        if live.is_sharded:
            live.expect_usable([live.buffers], {})
            write_part(directory, live.parts, progress=point.progress)
        elif dist.get_world_size() > 1:
            copies = live.copies(point.on_cpu, with_buffers=True)
            buffers = [copies.get(key_of(each), each) for each in live.buffers]
            live.expect_usable([buffers], copies, with_large=dist.get_rank() == 0)
            whole = live.whole(self._small(), buffers, copies)
            changes = [*live.modules, *live.optimizers]
            write_replica(directory, whole, live.compared(whole), changes=changes)
        else:
            return self._writer.write_at(point, {}, directory)
        live.expect_unchanged(point.versions, point.sample)
        return point.place

    def _put(self, small: bytes, *, point: int, is_forecast: bool) -> bool:
        assert self._kept is not None
        pieces = [*self._generators.states(), small]
        by_gpu = self._live.gpu_buffers
        room = by_gpu.room() if by_gpu is not None else b""
        first = [room + LENGTHS.pack(*map(len, pieces)), *pieces]
        has_room = self._kept.put([*first, *self._live.views], point=point, is_forecast=is_forecast)
        if has_room and by_gpu is not None:
            by_gpu.fill(self._kept.newest_at)
        if has_room and self._depot is not None:
            views = b"".join(self._live.views)
            alone = [*pieces[:-1], views]
            self._depot.put(point, [*first, views], is_forecast=is_forecast, alone=alone)
        return has_room

    def _begin(self) -> str | None:
        """Start to keep states; return the reason if that isn't possible."""
        if not self._survivor.can_keep:
            return "this run has no agent"
        live = self._live
        why_not = live.begin(
            whose=self._whose,
            copies_shards=self._survivor.copies is not None and self._is_ours,
            copies_gpu=self._is_ours,
        )
        if why_not is not None:
            return why_not
        pieces = [*self._generators.states(), pickle.dumps(self._small(), protocol=5)]
        by_gpu = live.gpu_buffers
        size = sum(map(len, (*pieces, *live.views))) + (0 if by_gpu is None else by_gpu.size)
        self._size = size + live.large_bytes()
        if live.gpu_queue is not None:
            self._points.on_gpu = GpuPoints(live.gpu_queue.mark)
        if live.is_sharded:
            self._size *= get_context().get_local_world_size()
        elif size > _MOST_SMALL:
            return f"its buffers and small parts have {size / 1e6:.0f} MB"
        else:
            self._kept = self._survivor.keep(
                self._writer, capacity=size * 2 + _ROOM, size=self._size
            )
            self._writer.kept = self._kept
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


@lru_cache
def _forecast(forwards: int) -> bytes:
    """Return what a rank foretells that has nothing alone."""
    return pickle.dumps({"forwards": forwards}, protocol=5)


_current: tuple[Any, Keeper] | None = None
"""The attempt's context, and its keeper."""

_has_hooks = False


def start(keeps: Keeper) -> Keeper:
    """Start to keep the state of an attempt, whose parts are restored; of a second one, nothing."""
    global _current, _has_hooks
    if not _has_hooks:
        _has_hooks = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        replace_backward_engine(_noting_backward)
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


@contextmanager
def unnoted_steps() -> Iterator[None]:
    """Have this attempt's keeper take no notice of optimizers' steps in a block."""
    global _current
    kept, _current = _current, None
    try:
        yield
    finally:
        _current = kept


# A compiled step would be compiled again for each number that it counts here.
@torch.compiler.disable
def _before_step(optimizer: Any, *_: Any) -> None:
    if _current is not None:
        _current[1].begins_step(optimizer)


@torch.compiler.disable
def _after_step(optimizer: Any, *_: Any) -> None:
    if _current is not None:
        _current[1].after_step(optimizer)


def _noting_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        # `torch.autograd.grad` returns gradients, and leaves the parameters' as they are.
        if _current is not None and options.get("accumulate_grad"):
            _current[1].before_backward()
        return run(*args, **options)

    return noted


def _after_forward() -> None:
    if _current is not None:
        _current[1].after_forward()
