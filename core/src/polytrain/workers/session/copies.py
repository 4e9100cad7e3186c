"""Copies the state of a training, for a loss that leaves no rank (`CheckpointConfig.memory`).

A copy is a checkpoint's part in a directory on the node, where it outlives its process. Once it is
complete, the worker process sends a message to the agent: only then does the copy count. The system
writes it to a disk later, if it still exists.

Several ranks copy at the same steps, each its own part, and never wait for each other. A step needs
all ranks: when one begins a copy, all have the one before, so only what is older is deleted. A rank
that can't make a copy tells the driver, and waits until all others are asked to drop theirs: no
step is taken meanwhile, so all still have the one before.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.staging import COPIES, Stagings, clear, remove
from polytrain.policy.copies import CopyPace
from polytrain.workers.processes.channel import Channel, Message
from polytrain.workers.session.messages import (
    uncopied_message,
    uncopyable_message,
    written_message,
)
from polytrain.workers.session.survivor import NotCleanError, Place, staged_state

logger = logging.getLogger(__name__)

_AT_ONCE = 2
"""Number of copies that are there while the newer one is made."""

_AGREED_WITHIN_S = 20.0
"""Seconds that a rank which can't copy waits until all ranks are asked to drop theirs.

Milliseconds are the rule. If it gave up earlier than a busy driver answers, the others would delete
the last copy that all have, at their next one.
"""

_NAP_S = 0.001
_LONGEST_NAP_S = 0.05


@dataclass(slots=True, kw_only=True)
class Copies:
    """The copies of one attempt. All methods are called by the thread that trains."""

    channel: Channel
    attempt: AttemptId
    rank: int
    is_alone: bool
    """Whether there is no other rank."""

    scratch: Path
    """The run's directory on the node."""

    pace: CopyPace
    copying: Callable[[], AbstractContextManager[None]]
    """Counts the time as time in which the training waits for a copy."""

    dropped: Callable[[], Sequence[tuple[int, bool]]] = tuple
    """Returns the copies that the driver has had all ranks drop since the last call: the number of
    each, and whether none is made any more."""

    are_sent: bool = False
    """Whether the agent sends copies to another host. It then keeps the last two that were sent."""

    is_used: bool = False
    """Whether anything has said what the training's state is."""

    _steps: int = 0
    _has_begun: bool = False
    _complete: list[tuple[int, Path]] = field(default_factory=list)
    """The copies that are there, by number, oldest first."""

    _unconfirmed: tuple[int, Path, Message] | None = None
    """The copy that counts once the training has another batch, and the message that says so."""

    _is_over: bool = False
    """Whether no copies are made any more."""

    _has_warned: bool = False
    """Whether a state that couldn't be copied was named."""

    _stagings: Stagings = field(init=False)

    def __post_init__(self) -> None:
        self._stagings = Stagings(scratch=self.scratch / COPIES, near=None)

    def step(
        self,
        write: Callable[[Path], Place],
        *,
        size: int,
        number: int | None = None,
        is_confirmed: bool = True,
    ) -> None:
        """Note a step, and copy the state after it if it is time. Errors don't end the training.

        Args:
            write: writes what a checkpoint holds into an empty directory, and returns the session's
                place. It raises `NotCleanError` if training couldn't continue from it.
            size: bytes of what all ranks of this node copy, about; 0 if that isn't known.
            number: the step's number in the attempt: the parts of several ranks that have the same
                one belong together. None if all ranks have the same state, so that only a rank
                without others copies it.
            is_confirmed: whether the copy counts at once, and not only after `confirm`.
        """
        self.is_used = True
        self._steps += 1
        began = time.monotonic()
        if number is None and not self.is_alone:
            self._say_replicas()
            return
        if self._is_over or not self.pace.is_due(began):
            return
        number = self._steps if number is None else number
        with self.copying():
            if not self._has_dropped(number):
                self._try_copy(write, number, size)
                if is_confirmed:
                    self.confirm()
        self.pace.copied(began, time.monotonic())

    def _say_replicas(self) -> None:
        """Say once, in the first attempt, that nothing is copied."""
        if self.rank == 0 and self.attempt.attempt == 0 and not self._has_warned:
            self._has_warned = True
            self._warn(
                "keeps no copies with several workers of this kind: each has the whole state, and "
                "after a loss another one hands it on. If all are lost at once, the run continues "
                "from its last checkpoint"
            )

    def _try_copy(self, write: Callable[[Path], Place], number: int, size: int) -> None:
        try:
            self._copy(write, number, size)
        except NotCleanError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"can't copy the state at this step, and tries later ones: {error}")
            self._drop_everywhere(number, str(error), is_last=False)
        except Exception as error:  # a full disk, or a state that can't be saved
            why = str(error) or type(error).__name__
            self._end(why)
            self._drop_everywhere(number, why, is_last=True)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether there is a copy that doesn't count yet."""
        return self._unconfirmed is not None

    def confirm(self) -> None:
        """Have the last copy count: the training can continue from it."""
        if self._unconfirmed is None:
            return
        number, staging, message = self._unconfirmed
        self._unconfirmed = None
        self.channel.send(message)
        self._complete.append((number, staging))
        if self.is_alone:
            self._keep_newest()

    def withdraw(self, why: str) -> None:
        """Delete the last copy, which doesn't count yet; the one before stays.

        Args:
            why: why the training couldn't continue from it.
        """
        if self._unconfirmed is not None:
            number = self._unconfirmed[0]
            self._forget_unconfirmed()
            self._drop_everywhere(number, why, is_last=False)

    def _forget_unconfirmed(self) -> None:
        if self._unconfirmed is not None:
            remove(self._unconfirmed[1])
            self._unconfirmed = None

    def refuse(self, why: str) -> None:
        """Note that no copies can be made any more; rank 0 says so once."""
        self.is_used = True
        if self._is_over:
            return
        if self.rank == 0:
            self._end(why)
        self._is_over = True
        if self._has_begun:
            self._drop_everywhere(0, why, is_last=True)

    def _drop_everywhere(self, number: int, why: str, *, is_last: bool) -> None:
        """Have all ranks drop a copy, and wait until they are asked to, before the next step.

        Args:
            number: the copy's number; 0 if none was being made.
            why: why this rank hasn't made it.
            is_last: whether it makes no other.
        """
        if self.is_alone:
            return
        self.channel.send(uncopyable_message(number, why, is_last=is_last))
        until, nap = time.monotonic() + _AGREED_WITHIN_S, _NAP_S
        while not self._has_dropped(number, is_last=is_last) and time.monotonic() < until:
            time.sleep(nap)
            nap = min(nap * 2, _LONGEST_NAP_S)

    def _has_dropped(self, number: int, *, is_last: bool = False) -> bool:
        """Drop what the driver wants dropped; return whether that is this copy, or all later ones.

        Args:
            number: the copy's number.
            is_last: whether only the latter counts.
        """
        if self.is_alone:
            return False
        has_dropped = False
        for dropped, ends in self.dropped():
            has_dropped |= ends or (dropped >= number and not is_last)
            self._is_over |= ends
            if self._unconfirmed is not None and self._unconfirmed[0] == dropped:
                self._forget_unconfirmed()
            for copy in [each for each in self._complete if each[0] == dropped]:
                self._complete.remove(copy)
                self._delete(*copy)
        return has_dropped

    def _end(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._warn(f"keeps no copies of the training's state: {why}")

    def _warn(self, what: str) -> None:
        logger.warning("CheckpointConfig(memory=%r) %s.", self.pace.every, what)

    def _copy(self, write: Callable[[Path], Place], number: int, size: int) -> None:
        """
        Raises:
            NotCleanError: the training couldn't continue from the state.
            OSError: there is no room for it.
        """
        if not self._has_begun:
            clear(self.scratch / COPIES, before=self.attempt)
            self._expect_room(size)
            self._has_begun = True
        self._forget_unconfirmed()
        self._keep_newest()
        name = directory_name(number, self.attempt)
        staging, place = staged_state(self._stagings, name, self.rank, write)
        message = written_message(number, staging, place, is_copy=True)
        self._unconfirmed = number, staging, message

    def _keep_newest(self) -> None:
        """Delete all copies but the newest one."""
        while len(self._complete) > 1:
            self._delete(*self._complete.pop(0))

    def _delete(self, number: int, staging: Path) -> None:
        # From here on the agent won't take what is left of it.
        self.channel.send(uncopied_message(number))
        remove(staging)

    def _expect_room(self, size: int) -> None:
        there = shutil.disk_usage(self.scratch).free
        count, needed = ("four", 2 * _AT_ONCE) if self.are_sent else ("two", _AT_ONCE)
        if there < needed * size:
            raise OSError(
                f"{count} copies need {needed * size / 1e6:.0f} MB, and {self.scratch} has room "
                f"for {there / 1e6:.0f} MB; set TMPDIR to a directory with more"
            )
