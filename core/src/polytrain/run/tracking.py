"""Sends a run's rows to its trackers while it lasts. None of them is waited for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from polytrain.common.errors import RunOwnedError
from polytrain.run.history import entries, read_history
from polytrain.run.journal import JOURNAL
from polytrain.run.tracker_delivery import (
    StoreBehindError,
    TrackedFacts,
    TrackerDelivery,
    send_missing,
)
from polytrain.trackers.destinations import sync_command
from polytrain.trackers.tracker import Tracker

logger = logging.getLogger(__name__)

_QUEUED = 10_000
"""Entries that wait for a tracker. One that has more is sent the rest when the run ends."""

_PENDING = 1_000_000
"""Rows that wait for a checkpoint, or for a tracker that can't be reached."""

_SEND_EVERY_S = 1.0
_RETRY_AFTER_AT_MOST_S = 60.0
_END_WITHIN_S = 60.0
"""Seconds that the end of a run waits for its trackers."""


class Tracking:
    """The trackers of a run, in a driver. `follow` is called with the journal's entries."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        facts: TrackedFacts,
        *,
        own_token: int,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            trackers: the trackers.
            facts: the run.
            own_token: fencing token of this driver's lease.
            check_lease: raises if another driver has taken the run over: it sends from then on.
        """
        self._couriers = tuple(_Courier(each, facts, own_token, check_lease) for each in trackers)

    def follow(self, entry: Mapping[str, Any]) -> None:
        """Take an entry of the journal. It is sent on another thread."""
        for courier in self._couriers:
            courier.take(entry)

    def __enter__(self) -> Tracking:
        for courier in self._couriers:
            courier.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Send what is missing. The journal is complete, and this driver still has its lease."""
        for courier in self._couriers:
            courier.end()
        deadline = time.monotonic() + _END_WITHIN_S
        for courier in self._couriers:
            courier.join(deadline - time.monotonic())


class _Courier:
    """A thread that sends to one tracker."""

    def __init__(
        self,
        tracker: Tracker,
        facts: TrackedFacts,
        own_token: int,
        check_lease: Callable[[], None],
    ) -> None:
        self._check_lease = check_lease
        self._tracker = tracker
        self._facts = facts
        self._own_token = own_token
        self._queue: deque[Mapping[str, Any]] = deque()
        self._is_behind = False
        """Whether entries were dropped: what is missing is sent from the journal at the end."""

        self._has_warned = False
        self._delivery: TrackerDelivery | None = None
        self._ending = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(
            target=self._work, name=f"polytrain-{tracker.name}", daemon=True
        )

    def take(self, entry: Mapping[str, Any]) -> None:
        if len(self._queue) < _QUEUED:
            self._queue.append(entry)
        else:
            self._is_behind = True

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Let the thread send what is missing, and end."""
        self._ending.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, for so long."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._given_up = True
            self._warn_of_the_rest("it takes too long")

    def _work(self) -> None:
        wait_s = 0.0
        while not self._ending.wait(wait_s) and not self._is_behind:
            try:
                self._send()
                wait_s = _SEND_EVERY_S
            except RunOwnedError:
                break
            except StoreBehindError:
                self._is_behind = True
            except Exception as error:
                self._warn(error)
                wait_s = min(max(2 * wait_s, _SEND_EVERY_S), _RETRY_AFTER_AT_MOST_S)
        if self._is_behind or self._delivery is None:
            self._queue.clear()
            self._release()
        self._ending.wait()
        try:
            self._check_lease()
            self._send_rest()
        except RunOwnedError as error:
            logger.warning(
                "The tracker %s is left to another driver: %s", self._tracker.name, error
            )
        except Exception as error:
            if not self._given_up:
                self._warn_of_the_rest(_text(error))
        finally:
            self._release()

    def _send(self) -> None:
        if self._delivery is None:
            self._delivery = self._opened()
        self._take_queued(self._delivery)
        if len(self._delivery.missing) > _PENDING:
            self._is_behind = True
            return
        self._check_lease()
        self._delivery.send(is_wanted=lambda: not self._ending.is_set())

    def _send_rest(self) -> None:
        """Send what is missing: from the queue if that has had everything, or from the journal."""
        location = self._facts.location
        if self._delivery is not None and not self._is_behind:
            self._take_queued(self._delivery)
            with contextlib.suppress(StoreBehindError):
                self._delivery.send(is_wanted=self._is_wanted)
                history = read_history(location.open().read_log(JOURNAL))
                if history is not None and self._is_wanted():
                    self._delivery.finish(history)
                return
        self._release()
        send_missing(self._tracker, location, is_wanted=self._is_wanted)

    def _is_wanted(self) -> bool:
        return not self._given_up

    def _take_queued(self, delivery: TrackerDelivery) -> None:
        with contextlib.suppress(IndexError):
            while True:
                delivery.take(self._queue.popleft())

    def _opened(self) -> TrackerDelivery:
        delivery = TrackerDelivery(self._tracker, self._facts)
        # Those of this driver are in the queue.
        for entry in self._entries_of_earlier_drivers():
            delivery.take(entry)
        return delivery

    def _entries_of_earlier_drivers(self) -> Iterator[Mapping[str, Any]]:
        if self._facts.since == self._own_token:
            return
        for entry in entries(self._facts.location.open().read_log(JOURNAL)):
            if self._facts.since <= entry["token"] < self._own_token:
                yield entry

    def _release(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        with delivery:
            try:
                delivery.keep()
            except OSError as error:
                logger.debug("The position of %s can't be kept: %s", self._tracker.name, error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The tracker %s can't be used now: %s. Training continues; what it lacks is sent "
                "when it can be used again, or when the run ends.",
                self._tracker.name,
                _text(error),
            )

    def _warn_of_the_rest(self, why: str) -> None:
        logger.warning(
            "The tracker %s lacks a part of the run: %s. Send it with: %s",
            self._tracker.name,
            why,
            sync_command(self._tracker, self._facts.location),
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
