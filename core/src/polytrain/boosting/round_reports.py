"""Reports of boosting rounds by the engines, which keep each round's place.

So a rank that survives a loss can save its model. No tree is copied while training continues. A
round in progress adds its trees to the model at its end, which it can't reach without the lost
rank: those of the rounds before can be read meanwhile.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgpack

from polytrain.extension import KeptState, KeptStates, NotCleanError, Place, survivor
from polytrain.linux.progress_page import beat
from polytrain_plugins import Session

logger = logging.getLogger(__name__)

_NO_ROUND = "this booster can't be saved between two rounds; set checkpoint_frequency instead"


def history_in(checkpoint: Path, filename: str, *, option: str) -> str:
    """Return the text of a checkpoint's history of rounds.

    Args:
        filename: the history's file.
        option: the option for a model to continue.

    Raises:
        ValueError: the checkpoint has none, as those of training functions.
    """
    try:
        return (checkpoint / filename).read_text()
    except FileNotFoundError as error:
        raise ValueError(
            f"The checkpoint to start from has no {filename} with the history of its rounds: a "
            f"training function or another program has saved it. Continue its model by {option}=…, "
            "without restore_from."
        ) from error


class RoundReports:
    """Reports the rounds of an attempt to its session."""

    def __init__(self, session: Session, *, reported: int, state: RoundState | None = None) -> None:
        """
        Args:
            reported: number of rounds reported before the restart. Some models repeat them.
            state: saves the last round; None if this training can't.
        """
        self._session = session
        copies = survivor().copies
        if copies is not None and state is None:
            copies.refuse(_NO_ROUND)
        is_kept = session.world.size > 1 or copies is not None
        self._keeper = RoundKeeper(state) if is_kept and state is not None else None
        self._reported = reported
        self._has_warned = session.world.me.rank > 0

    def __call__(self, round_: int, metrics: Mapping[str, float], model: Any) -> None:
        """Report a round, and log a warning if a metric is NaN for the first time."""
        names = [repr(name) for name, value in metrics.items() if math.isnan(value)]
        if names and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NaN in round %d: %s. Early stopping and the choice of the best checkpoint can't "
                "use it. Look at the predictions and at the labels and weights of that data set, "
                "or choose another metric.",
                round_,
                ", ".join(names),
            )
        if round_ <= self._reported:
            beat()
            return
        if self._keeper is not None:
            self._keeper.ended(round_, metrics, model)
        self._session.report(step=round_, metrics=metrics, model=model)


_ROOM = 1 << 14
"""Bytes for a note to grow."""

_SETTLED_S = 0.02
"""A training that has ended no round for so long waits for the lost rank."""

_BEHIND_S = 0.3
"""How long to wait for a round that another rank has ended."""

_NAP_S = 0.001


class RoundState(Protocol):
    """What one framework's checkpoints hold."""

    def note(self, model: Any) -> Mapping[str, Any]:
        """Return what a round adds to a checkpoint beside its trees, in plain values.

        "rounds" is the number of rounds in the model; it is the same on all ranks.
        """

    def rounds(self, model: Any) -> int:
        """Return the number of rounds in the model now."""

    def write(self, model: Any, round_: int, note: Mapping[str, Any], directory: Path) -> None:
        """Write a checkpoint's files.

        Args:
            model: the model, which may have a round more.
            round_: the run's round, from 1.
            note: that round's, of this or another rank.

        Raises:
            NotCleanError: the model of that round can't be had.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """The last round that this rank has ended."""

    round_: int
    at: float
    """When, in monotonic time."""

    before: Place
    """The session's place before the round's report."""

    metrics: Mapping[str, Any]
    note: Mapping[str, Any]
    model: Any


class RoundKeeper:
    """The `StateWriter` of a booster. All ranks have the same trees."""

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._survivor = survivor()
        self._lock = threading.Lock()
        self._is_held = False
        self._done: _Done | None = None
        self._kept: KeptStates | None = None

    def ended(self, round_: int, metrics: Mapping[str, Any], model: Any) -> None:
        """Note that a round has ended and is about to be reported.

        Args:
            metrics: the round's metrics; the same on all ranks.
        """
        if not self._survivor.can_keep:
            return
        note = self._state.note(model)
        # A metric of the user's may be a number of NumPy's.
        content: bytes = msgpack.packb((dict(metrics), note), default=float)
        if self._kept is None:
            self._kept = self._survivor.keep(self, capacity=2 * len(content) + _ROOM, size=0)
        done = _Done(
            round_=round_,
            at=time.monotonic(),
            before=self._survivor.place(),
            metrics=metrics,
            note=note,
            model=model,
        )
        with self._lock:
            is_held = self._is_held
            if not is_held:
                self._done = done
        if is_held:
            # The agent kills this process: its state belongs to the next attempt.
            threading.Event().wait()
        # Peers take it if they have the trees, but not the metrics.
        self._kept.put([content], point=round_, is_forecast=False)
        if self._survivor.copies is not None:
            # Only its trees would tell how large it is.
            self._survivor.copies.step(self._copy, size=0)

    def _copy(self, directory: Path) -> Place:
        done = self._done
        assert done is not None
        self._state.write(done.model, done.round_, done.note, directory)
        return _after(done)

    def hold(self, point: int, has_time: Callable[[], bool]) -> int:
        """See `StateWriter`."""
        begun = time.monotonic()
        while True:
            with self._lock:
                done, now = self._done, time.monotonic()
                is_there = done is not None and done.round_ >= point
                has_settled = is_there and done is not None and now - done.at > _SETTLED_S
                if has_settled or now - begun > _BEHIND_S or not has_time():
                    self._is_held = True
                    break
            time.sleep(_NAP_S)
        if done is None:
            raise NotCleanError("it hasn't finished a round")
        return done.round_

    def write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        """See `StateWriter`."""
        done = self._done
        assert done is not None
        for state in (state for states in kept.values() for state in states):
            if state.point == done.round_ + 1 and not state.is_forecast:
                metrics, note = msgpack.unpackb(state.content)
                if self._state.rounds(done.model) >= note["rounds"]:
                    done = replace(
                        done,
                        round_=state.point,
                        before=_after(done),
                        metrics=metrics,
                        note=note,
                    )
                break
        before = self._state.rounds(done.model)
        self._state.write(done.model, done.round_, done.note, directory)
        if self._state.rounds(done.model) != before:
            raise NotCleanError("a round ended while the model was saved")
        return _after(done)


def _after(done: _Done) -> Place:
    """Return the place after the round's report."""
    return replace(done.before.after_report(done.metrics), is_report=False)
