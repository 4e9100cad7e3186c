"""Keeps the state of a Keras fit on several workers, for the case that another rank is lost.

A collective that fails may leave the variables half assigned, and nothing shows which. So each rank
reads all of them after a batch: TensorFlow copies a variable's memory when it assigns a new value
while the old one is held. All ranks keep the same batches; what each has of its own, such as
metrics and moving statistics, is kept where its agent can read it. After a loss a survivor writes
the newest batch of which every rank's own values are known.

The graph of a step does so itself, before its outputs meet those of other ranks: a step that has
ended on any rank is known of all of them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polytrain.extension import KeptState, KeptStates, NotCleanError, Place, Survivor
from polytrain_tf.callback_state import write_states
from polytrain_tf.local_variables import by_one_rank, bytes_of, local_part
from polytrain_tf.saved import Progress, save, storable, variables_of
from polytrain_tf.summing import summing

_SHARE = 0.03
"""Maximum share of the time in which the state is kept, and what is held is copied."""

_BYTES_PER_S = 2e9
"""The rate at which TensorFlow copies what is held when it assigns new values."""

_WARMUP, _MEASURED = 3, 8
"""Batches before the first that is measured, and those that are."""

_BEHIND_S = 0.5
"""How long to wait for a state that another rank has kept."""

_NAP_S = 0.001

_TRIES = 3
"""How often to save a model, if variables change while it is saved."""

_MOST_OWN = 16 << 20
"""Bytes of a rank's own values that may be kept."""

_SLOWNESS, _LEAST = 10, 10**10
"""A survivor has time by the bytes of its state, as memory is copied. Keras writes its files ten
times as slowly, and needs the time of so many bytes for a small model on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPoint:
    """Where a fit is, beside its variables."""

    place: Place
    progress: Progress
    callbacks: Mapping[tuple[str, str], Any]
    """The state of the callbacks that track progress."""

    is_within: bool
    """Whether it is after a batch of an epoch, and not at an epoch's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    number: int
    point: FitPoint
    values: Sequence[tf.Tensor]


class KeptForPeers:
    """The `StateWriter` of one fit on several workers."""

    def __init__(self, model: Any, survivor: Survivor, own_file: str) -> None:
        """
        Args:
            model: the model, after its first step.
            survivor: this process's.
            own_file: name of the file with each rank's own values.
        """
        self._model = model
        self._survivor = survivor
        self._own_file = own_file
        self._strategy = model.distribute_strategy
        self._variables = _all_variables(model)
        numbers = {id(each): number for number, each in enumerate(self._variables)}
        self._own = [numbers[id(each)] for each in own_variables(model)]
        self._parts = [local_part(self._strategy, each) for each in self._variables]
        self._read = tf.function(lambda: [part.read_value() for part in self._parts])
        self._size = sum(map(bytes_of, self._parts))
        self._kept: KeptStates | None = None
        self._newest: deque[_Kept] = deque(maxlen=2)
        self._number = 0
        self._batches = 0
        self._every = 1
        self._ended_at = 0.0
        self._times: list[float] = []
        """Seconds of each step that is measured."""

        self._keeping_s = 0.0
        """Seconds in which the state was kept since the last batch."""

        self._keeping_times: list[float] = []
        """These of each step that is measured."""

        self._lock = threading.Lock()
        self._is_held = False
        self._is_over = False

    def after_batch(self, point: Callable[[], FitPoint], *, is_kept: bool) -> None:
        """Keep the state after a batch, if it is this one's turn. All ranks call this together.

        Args:
            point: returns where the fit is.
            is_kept: whether the step's graph has kept it.
        """
        if self._is_over:
            return
        if not is_kept and self._is_due:
            with self._timed():
                self.keep(point())
        keeping_s, self._keeping_s = self._keeping_s, 0.0
        self._batches += 1
        before, self._ended_at = self._ended_at, time.monotonic()
        if _WARMUP < self._batches <= _WARMUP + _MEASURED:
            self._times.append(self._ended_at - before)
            self._keeping_times.append(keeping_s)
            if len(self._times) == _MEASURED:
                self._agree()

    def with_state_kept(self, outputs: Any, point: Callable[[], FitPoint | None]) -> Any:
        """Return a step's outputs, in its graph, which exist once its state is kept.

        Args:
            outputs: what the step returns to be reduced over the ranks.
            point: returns where the fit is; None where it can't continue.
        """
        self._begin()
        if self._is_over:
            return outputs

        def keep(*values: tf.Tensor) -> bool:
            self.wait_if_held()
            if self._is_due:
                with self._timed():
                    now = point()
                    if now is not None:
                        self._put(now, values)
            return True

        values = [part.read_value() for part in self._parts]
        is_kept = tf.py_function(keep, values, tf.bool)
        with tf.control_dependencies([is_kept]):
            return keras.tree.map_structure(tf.identity, outputs)

    def keep(self, point: FitPoint) -> None:
        """Keep the state now. All ranks call this together."""
        self._begin()
        if not self._is_over:
            self._put(point, self._read())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._keeping_s += time.monotonic() - began

    @property
    def _is_due(self) -> bool:
        return (self._batches + 1) % self._every == 0

    def _begin(self) -> None:
        """Make the memory for this rank's own values, once."""
        if self._kept is not None or self._is_over:
            return
        size = sum(bytes_of(self._parts[number]) for number in self._own)
        if size > _MOST_OWN:
            self._is_over = True
            self._survivor.keep_nothing(f"each rank has {size / 1e6:.0f} MB of its own")
            return
        bytes_of_time = _LEAST + _SLOWNESS * self._size
        self._kept = self._survivor.keep(self, capacity=size, size=bytes_of_time)

    def _put(self, point: FitPoint, values: Sequence[tf.Tensor]) -> None:
        assert self._kept is not None
        pieces = self._own_in(values)
        self._number += 1
        # Before the values that it goes with count: they may be asked for in between.
        self._kept.put(pieces, point=self._number, is_forecast=False)
        with self._lock:
            self._newest.append(_Kept(number=self._number, point=point, values=values))

    def wait_if_held(self) -> None:
        """Stop here if the state is being written: the agent kills this process after that."""
        with self._lock:
            is_held = self._is_held
        if is_held:
            threading.Event().wait()

    def _agree(self) -> None:
        """Agree with all ranks on how often to keep the state."""
        keeping_s = statistics.median(self._keeping_times)
        step_s = statistics.median(self._times) - keeping_s
        mine = [int(1e6 * (self._size / _BYTES_PER_S + keeping_s)), int(1e6 * step_s)]
        costs, steps = summing(self._strategy)(mine)
        self._every = max(1, math.ceil(costs / (_SHARE * max(1, steps))))

    def hold(self, point: int, has_time: Callable[[], bool]) -> int:
        """See `StateWriter`. The lost rank may have reported an epoch that this one ends soon."""
        until = time.monotonic() + _BEHIND_S
        while True:
            is_late = time.monotonic() > until or not has_time()
            with self._lock:
                newest = self._newest[-1].number if self._newest else 0
                if newest >= point or is_late:
                    self._is_held = True
                    break
            time.sleep(_NAP_S)
        if not newest:
            raise NotCleanError("it hasn't finished a batch")
        return newest

    def write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        """See `StateWriter`."""
        now = _all_variables(self._model)
        if list(map(id, now)) != list(map(id, self._variables)):
            raise NotCleanError("variables were made or replaced after the fit's first step")
        newest, own = self._newest_of_all(kept)
        values = newest.values
        if not all(np.isfinite(value.numpy()).all() for value in values):
            raise NotCleanError("a variable isn't a finite number")
        # The step that the lost rank takes no more part in may still be changing variables.
        if not any(self._are_saved(values, newest.point, directory) for _ in range(_TRIES)):
            raise NotCleanError("a step ended while the model was saved")
        write_states(newest.point.callbacks, directory)
        if newest.point.is_within:
            write_own(directory / self._own_file, own)
        # Every rank reports each epoch: what the lost one has reported since is reported again.
        return replace(newest.point.place, is_earlier=newest.point.is_within)

    def _are_saved(self, values: Sequence[tf.Tensor], point: FitPoint, directory: Path) -> bool:
        """Save the model with these values; return whether nothing has changed them meanwhile."""
        for part, value in zip(self._parts, values, strict=True):
            part.assign(value)
        with by_one_rank(self._strategy):
            save(self._model, directory, point.progress)
        # Saving resets metrics, which are in the file of ranks' own values.
        reset = {id(local_part(self._strategy, each)) for each in self._model.metrics_variables}
        return all(
            id(part) in reset or part.numpy().tobytes() == value.numpy().tobytes()
            for part, value in zip(self._parts, values, strict=True)
        )

    def _newest_of_all(
        self, kept: Mapping[int, Sequence[KeptState]]
    ) -> tuple[_Kept, dict[int, list[Any]]]:
        """Return the newest state of which every rank's own values are known, and these."""
        with self._lock:
            points = [*reversed(self._newest)]
        for each in points:
            if not each.point.is_within:
                # At an epoch's report, ranks have no values of their own.
                return each, {}
            found = {
                rank: state.content
                for rank, states in kept.items()
                for state in states
                if state.point == each.number
            }
            # Since the agent has read this rank's, it may have ended a batch.
            found[self._survivor.rank] = b"".join(self._own_in(each.values))
            if len(found) == len(kept):
                return each, {rank: self._own_of(content) for rank, content in found.items()}
        raise NotCleanError("the lost rank's own values are older")

    def _own_in(self, values: Sequence[tf.Tensor]) -> list[bytes]:
        return [values[number].numpy().tobytes() for number in self._own]

    def _own_of(self, content: bytes) -> list[Any]:
        values, at = [], 0
        for number in self._own:
            part = self._parts[number]
            dtype, end = part.dtype.as_numpy_dtype, at + bytes_of(part)
            values.append(np.frombuffer(content[at:end], dtype).reshape(part.shape))
            at = end
        return values


def _all_variables(model: Any) -> list[Any]:
    found = [*variables_of(model), *model.metrics_variables]
    return list({id(each): each for each in found}.values())


def own_variables(model: Any) -> list[Any]:
    """Return the variables that may differ between ranks, metrics last.

    Only those that are trained have the same values on all ranks: a layer assigns others by the
    rank's own rows, whatever their aggregation is.
    """
    metrics = list(model.metrics_variables)
    others = {id(each) for each in (*model.trainable_variables, *metrics)}
    return [*(each for each in model.variables if id(each) not in others), *metrics]


def write_own(file: Path, own: Mapping[int, Sequence[Any]]) -> None:
    """Write the own values of ranks."""
    np.savez(
        file,
        **{
            f"{rank}/{number}": storable(value)
            for rank, values in own.items()
            for number, value in enumerate(values)
        },
    )


def read_own(file: Path, rank: int, ranks: int, variables: Sequence[Any]) -> list[Any]:
    """Return the own values of a rank.

    On another number of workers, rank 0 has the sum of what TensorFlow adds up over the ranks on
    reading, such as metrics, and the others have nothing of it. Other values are those of one of
    the ranks before.

    Args:
        file: what `write_own` has written.
        rank: the rank now.
        ranks: the number of ranks now.
        variables: the model's own variables.
    """
    with np.load(file) as saved:
        names = [tuple(map(int, name.split("/"))) for name in saved.files]
        before = 1 + max((of for of, _ in names), default=0)

        def of_rank(number: int, variable: Any) -> Any:
            if ranks == before or not _is_summed(variable):
                return saved[f"{rank % before}/{number}"]
            if rank > 0:
                return np.zeros_like(saved[f"0/{number}"])
            parts = [saved[f"{of}/{number}"] for of in range(before)]
            return np.sum(parts, axis=0, dtype=parts[0].dtype)

        return [of_rank(number, variable) for number, variable in enumerate(variables)]


def _is_summed(variable: Any) -> bool:
    return bool(variable.synchronization == "on_read" and variable.aggregation == "sum")
