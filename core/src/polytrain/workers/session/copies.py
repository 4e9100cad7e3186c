"""Copies the state of a training that no other rank has (`CheckpointConfig.memory`).

A copy is a checkpoint's part in a directory on the node, where it outlives its process. Once it is
complete, the worker process sends a message to the agent: only then does the copy count. The system
writes it to a disk later, if it still exists.

Several ranks copy at the same steps, each its own part, and never wait for each other. A step needs
all ranks: when one begins a copy, all have the one before, so only what is older is deleted.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.staging import COPIES, Stagings, clear, remove
from polytrain.policy.copy_pace import CopyPace
from polytrain.workers.processes.channel import Channel
from polytrain.workers.session.messages import uncopied_message
from polytrain.workers.session.survivor import NotCleanError, Place, message_of, staged_state

logger = logging.getLogger(__name__)

_AT_ONCE = 2
"""Number of copies that are there while the newer one is made."""


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

    is_used: bool = False
    """Whether anything has said what the training's state is."""

    _steps: int = 0
    _has_begun: bool = False
    _complete: list[tuple[int, Path]] = field(default_factory=list)
    """The copies that are there, by number, oldest first."""

    _is_over: bool = False
    """Whether no copies are made any more."""

    _has_warned: bool = False
    """Whether a state that couldn't be copied was named."""

    _stagings: Stagings = field(init=False)

    def __post_init__(self) -> None:
        self._stagings = Stagings(scratch=self.scratch / COPIES, near=None)

    def step(self, write: Callable[[Path], Place], *, size: int, number: int | None = None) -> None:
        """Note a step, and copy the state after it if it is time. Errors don't end the training.

        Args:
            write: writes what a checkpoint holds into an empty directory, and returns the session's
                place. It raises `NotCleanError` if training couldn't continue from it.
            size: bytes of what all ranks of this node copy, about; 0 if that isn't known.
            number: the step's number in the attempt: the parts of several ranks that have the same
                one belong together. None if all ranks have the same state, so that only a rank
                without others copies it.
        """
        self.is_used = True
        self._steps += 1
        began = time.monotonic()
        is_replica = number is None and not self.is_alone
        if self._is_over or is_replica or not self.pace.is_due(began):
            return
        with self.copying():
            try:
                self._copy(write, self._steps if number is None else number, size)
            except NotCleanError as error:
                if not self._has_warned:
                    self._has_warned = True
                    self._warn(f"can't copy the state at this step, and tries later ones: {error}")
            except Exception as error:  # a full disk, or a state that can't be saved
                self._end(str(error) or type(error).__name__)
        self.pace.copied(began, time.monotonic())

    def refuse(self, why: str) -> None:
        """Note that no copies can be made any more; rank 0 says so once."""
        self.is_used = True
        if self.rank == 0:
            self._end(why)
        self._is_over = True

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
        self._keep_newest()
        name = directory_name(number, self.attempt)
        staging, place = staged_state(self._stagings, name, self.rank, write)
        self.channel.send(message_of(number, staging, place, is_copy=True))
        self._complete.append((number, staging))
        if self.is_alone:
            self._keep_newest()

    def _keep_newest(self) -> None:
        """Delete all copies but the newest one."""
        while len(self._complete) > 1:
            number, staging = self._complete.pop(0)
            # From here on the agent won't take what is left of it.
            self.channel.send(uncopied_message(number))
            remove(staging)

    def _expect_room(self, size: int) -> None:
        there = shutil.disk_usage(self.scratch).free
        if there < _AT_ONCE * size:
            raise OSError(
                f"two copies need {_AT_ONCE * size / 1e6:.0f} MB, and {self.scratch} has room for "
                f"{there / 1e6:.0f} MB; set TMPDIR to a directory with more"
            )
