"""Requests to a run, to stop or for the stacks of all ranks: from this process, and from others.

Other processes write them to the run's storage; no port is opened. A request is a file in
`requests/TOKEN/`. TOKEN is the fencing token of the driver's lease, so no later driver takes the
request. The driver polls for requests, and writes each answer beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NotRequired, TypedDict

from polytrain.errors import DamagedFileError
from polytrain.output.call_queues import CallQueue
from polytrain.storage.protocol import Storage
from polytrain.storage.typed_json import Digits, read_json
from polytrain_plugins import Stopped

logger = logging.getLogger(__name__)

_REQUESTS = "requests"
_ANSWER = ".answer"

_NAME = re.compile(rf"{_REQUESTS}/\d{{6,}}/[0-9a-f]{{16}}(?P<answer>{re.escape(_ANSWER)})?")
"""Path of a request, or of its answer. Other files are neither read nor deleted."""

_LARGEST = 1 << 16
"""Maximum bytes of a request."""

_LOOK_EVERY_S = {True: 1.0, False: 5.0}
"""Seconds between two polls, by whether the storage is a directory."""


class RequestKind(StrEnum):
    """The requests that another process can make."""

    STOP = "stop"
    STACKS = "stacks"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    kind: RequestKind
    reason: str = ""


class _Answer(TypedDict):
    stacks: NotRequired[dict[Digits, str]]


class StopRequests:
    """Passes requests to stop on to the driver; holds those that arrive before it exists."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Stopped] = queue.SimpleQueue()
        self._handle: Callable[[Stopped], None] | None = None
        self._interrupt: Callable[[], None] = _nobody
        self._wake: Callable[[], None] = _nobody

    def notify(self, handle: Callable[[Stopped], None], *, wake: Callable[[], None]) -> None:
        """Pass requests on; all are called from any thread, or from a signal handler.

        Args:
            handle: called with each request.
            wake: called when the run has to end at once.
        """
        self._handle, self._wake = handle, wake
        self._pass_on()

    def end_with(self, interrupt: Callable[[], None]) -> None:
        """Call `interrupt` when the run has to end at once."""
        self._interrupt = interrupt

    def end_at_once(self) -> None:
        """End the run without a checkpoint. Its thread raises `KeyboardInterrupt`."""
        self._interrupt()
        self._wake()

    def request(self, stopped: Stopped) -> None:
        """Request the run's end after its next checkpoint."""
        self._requests.put(stopped)
        self._pass_on()

    def _pass_on(self) -> None:
        with contextlib.suppress(queue.Empty):
            # Another thread, or a signal in between, may pass on what this one has put.
            while self._handle is not None:
                self._handle(self._requests.get_nowait())


def _nobody() -> None:
    """Do nothing: there is no run yet."""


class RemoteRequests:
    """The driver's side: takes requests while its context is open."""

    def __init__(
        self,
        storage: Storage,
        token: int,
        *,
        stop: Callable[[Stopped], None],
        stacks: Callable[[str], None],
        inline_thread: int | None = None,
    ) -> None:
        """
        Args:
            storage: the run's storage, without retries.
            token: the fencing token of this driver's lease.
            stop: called with requests to stop, on another thread.
            stacks: called with requests for stacks, on another thread; `answer` answers them.
            inline_thread: the thread that trains, if the run is inline.
        """
        self._storage = storage
        self._token = token
        self._stop = stop
        self._stacks = stacks
        self._inline_thread = inline_thread
        self._taken: set[str] = set()
        self._has_deleted_old = False
        # A short run ends before the first poll, and makes no request to its storage.
        self._pauses = itertools.repeat(_LOOK_EVERY_S[storage.is_local])
        self._looks = CallQueue("polytrain-requests", left_out=lambda count: None)

    def answer(self, request: str, content: Mapping[str, Any]) -> None:
        """Answer a request. An error of the storage is only logged."""
        try:
            self._storage.write(f"{request}{_ANSWER}", json.dumps(content).encode())
        except OSError as error:
            logger.warning("The request %s can't be answered: %s", request, error)

    def __enter__(self) -> RemoteRequests:
        self._looks.repeat(self._look, self._pauses)
        return self

    def __exit__(self, *_: object) -> None:
        self._looks.close()

    def _look(self) -> None:
        try:
            if not self._has_deleted_old:
                self._has_deleted_old = True
                self._delete_old()
            self._take_new()
        except Exception as error:  # a storage's client may raise anything; the next poll may work
            logger.debug("Requests to the run can't be read: %s", error)

    def _delete_old(self) -> None:
        """Delete requests to earlier drivers."""
        own = _directory(self._token)
        for path in self._storage.list(_REQUESTS):
            if not path.startswith(own) and _NAME.fullmatch(path):
                self._storage.delete(path)

    def _take_new(self) -> None:
        for path in self._storage.list(_directory(self._token)):
            name = _NAME.fullmatch(path)
            if name is None or name["answer"] or path in self._taken:
                continue
            self._taken.add(path)
            try:
                content = self._storage.read(path, at_most=_LARGEST)
                request = read_json(_Request, content, file=path)
            except DamagedFileError as error:
                logger.warning("A request to the run is passed over: %s", error)
                continue
            if request.kind is RequestKind.STOP:
                self._stop(Stopped(by="command", reason=request.reason))
                self.answer(path, {})
            elif self._inline_thread is not None:
                frame = sys._current_frames().get(self._inline_thread)
                self.answer(path, {"stacks": {"0": "".join(traceback.format_stack(frame))}})
            else:
                self._stacks(path)


class NoAnswerError(Exception):
    """The driver has not answered in time."""


def ask(
    storage: Storage, token: int, kind: RequestKind, *, timeout_s: float, reason: str = ""
) -> Mapping[str, Any]:
    """Send a request to a run's driver, and return its answer.

    Args:
        token: the fencing token of the driver's lease.
        timeout_s: seconds to wait for the answer.

    Raises:
        NoAnswerError: the driver hasn't answered in time.
        DamagedFileError: the answer's file is damaged.
        OSError: the storage can't be read or written.
    """
    path = f"{_directory(token)}{secrets.token_hex(8)}"
    storage.write(path, json.dumps({"kind": kind, "reason": reason}).encode())
    give_up_at = time.monotonic() + timeout_s
    try:
        while time.monotonic() < give_up_at:
            if f"{path}{_ANSWER}" in storage.list(_directory(token)):
                return read_json(_Answer, storage.read(f"{path}{_ANSWER}"), file=f"{path}{_ANSWER}")
            time.sleep(_LOOK_EVERY_S[storage.is_local] / 5)
        raise NoAnswerError(f"its driver has not answered for {timeout_s:g} s")
    finally:
        storage.delete(path)
        storage.delete(f"{path}{_ANSWER}")


def _directory(token: int) -> str:
    return f"{_REQUESTS}/{token:06d}/"
