"""Copies the state of a training that no other rank has (`CheckpointConfig.memory`).

A copy is a checkpoint's part in a directory on the node, where it outlives its process. Once it is
complete, the worker process sends a message to the agent: only then does the copy count. The system
writes it to a disk later, if it still exists.
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
    scratch: Path
    """The run's directory on the node."""

    pace: CopyPace
    copying: Callable[[], AbstractContextManager[None]]
    """Counts the time as time in which the training waits for a copy."""

    is_used: bool = False
    """Whether anything has said what the training's state is."""

    _number: int = 0
    _newest: Path | None = None
    _is_over: bool = False
    """Whether no copies are made any more."""

    _has_warned: bool = False
    """Whether a state that couldn't be copied was named."""

    _stagings: Stagings = field(init=False)

    def __post_init__(self) -> None:
        self._stagings = Stagings(scratch=self.scratch / COPIES, near=None)

    def step(self, write: Callable[[Path], Place], *, size: int) -> None:
        """Note a step, and copy the state after it if it is time. Errors don't end the training.

        Args:
            write: writes what a checkpoint holds into an empty directory, and returns the session's
                place. It raises `NotCleanError` if training couldn't continue from it.
            size: bytes of the whole state, about; 0 if that isn't known.
        """
        self.is_used = True
        began = time.monotonic()
        if self._is_over or not self.pace.is_due(began):
            return
        with self.copying():
            try:
                self._copy(write, size=size)
            except NotCleanError as error:
                if not self._has_warned:
                    self._has_warned = True
                    self._warn(f"can't copy the state at this step, and tries later ones: {error}")
            except Exception as error:  # a full disk, or a state that can't be saved
                self.refuse(str(error) or type(error).__name__)
        self.pace.copied(began, time.monotonic())

    def refuse(self, why: str) -> None:
        """Note that no copies can be made, and say so once."""
        self.is_used = True
        if not self._is_over:
            self._is_over = True
            self._warn(f"keeps no copies of the training's state: {why}")

    def _warn(self, what: str) -> None:
        logger.warning("CheckpointConfig(memory=%r) %s.", self.pace.every, what)

    def _copy(self, write: Callable[[Path], Place], *, size: int) -> None:
        """
        Raises:
            NotCleanError: the training couldn't continue from the state.
            OSError: there is no room for it.
        """
        if self._number == 0:
            clear(self.scratch / COPIES, before=self.attempt)
            self._expect_room(size)
        self._number += 1
        name = directory_name(self._number, self.attempt)
        staging, place = staged_state(self._stagings, name, self.rank, write)
        self.channel.send(message_of(self._number, staging, place, is_copy=True))
        older, self._newest = self._newest, staging
        if older is not None:
            remove(older)

    def _expect_room(self, size: int) -> None:
        there = shutil.disk_usage(self.scratch).free
        if there < _AT_ONCE * size:
            raise OSError(
                f"two copies need {_AT_ONCE * size / 1e6:.0f} MB, and {self.scratch} has room for "
                f"{there / 1e6:.0f} MB; set TMPDIR to a directory with more"
            )
