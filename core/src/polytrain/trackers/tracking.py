"""Sends a run's rows to its trackers while it lasts, without waiting for them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from polytrain.errors import RunOwnedError
from polytrain.record.entries import Entry, LoadMeasured, MetricsReported, ReportBlock
from polytrain.record.history import JOURNAL, entries, read_history
from polytrain.text.described import numbered
from polytrain.trackers.delivery import (
    StoreBehindError,
    TrackedFacts,
    TrackerDelivery,
    send_missing,
)
from polytrain.trackers.destinations import sync_command
from polytrain.trackers.tracker import Tracker

logger = logging.getLogger(__name__)

_QUEUED = 10_000
"""Maximum entries that wait for a tracker. Older ones are read from the journal."""

_SEND_EVERY_S = 1.0
_RETRY_AFTER_AT_MOST_S = 60.0
_END_WITHIN_S = 60.0
"""Seconds that the end of a run waits for its trackers."""


_UNCOUNTED = (MetricsReported, ReportBlock, LoadMeasured)
"""Entries without a number of their own. Reports have numbers, and the journal joins loads."""


class _JournalBehindError(Exception):
    """The journal doesn't yet contain entries that have fallen out of the queue."""


class Tracking:
    """The trackers of a run, in a driver. Call `follow` with the journal's entries."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        facts: TrackedFacts,
        *,
        own_token: int,
        check_lease: Callable[[], None] = lambda: None,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            own_token: fencing token of this driver's lease.
            check_lease: raises if another driver has taken over the run, and sends its rows.
            is_urgent: returns whether the program wants to end without waiting for trackers.
        """
        self._is_urgent = is_urgent
        self._senders = tuple(_Sender(each, facts, own_token, check_lease) for each in trackers)

    def follow(self, entry: Entry) -> None:
        """Queue an entry of the journal, to be sent on another thread."""
        if isinstance(entry, MetricsReported) and entry.rank:
            return
        for sender in self._senders:
            sender.take(entry)

    def __enter__(self) -> Tracking:
        for sender in self._senders:
            sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send missing rows. The journal is complete, and this driver still holds its lease."""
        for sender in self._senders:
            sender.end()
        deadline = time.monotonic() + _END_WITHIN_S
        for sender in self._senders:
            # Wait in short steps: a signal that makes the end urgent doesn't interrupt a wait.
            while sender.is_alive() and time.monotonic() < deadline and not self._is_urgent():
                sender.join(0.1)
            sender.stop_sending()


class _Sender(threading.Thread):
    """A thread that sends to one tracker.

    It takes entries from the queue. If some have fallen out, because the tracker was unavailable or
    is slow, it reads the run's journal, then later entries from the queue.
    """

    def __init__(
        self,
        tracker: Tracker,
        facts: TrackedFacts,
        own_token: int,
        check_lease: Callable[[], None],
    ) -> None:
        super().__init__(name=f"polytrain-{tracker.name}", daemon=True)
        self._check_lease = check_lease
        self._tracker = tracker
        self._facts = facts
        self._own_token = own_token
        self._queue: deque[tuple[int, Entry]] = deque(maxlen=_QUEUED)
        """Entries, each with the number of earlier entries other than reports."""

        self._taken = 0
        """Number of queued entries other than reports, which have their own numbers."""

        self._next: tuple[int, Entry] | None = None
        """An entry taken from the queue, while an entry before it is missing."""

        self._known = 0
        """Number of such entries that the delivery has."""

        # The queue only has this driver's entries.
        self._needs_journal = facts.since != own_token
        self._has_warned = self._has_lagged = False
        self._delivery: TrackerDelivery | None = None
        self._ending = threading.Event()
        self._has_stopped_sending = False

    def take(self, entry: Entry) -> None:
        self._queue.append((self._taken, entry))
        self._taken += not isinstance(entry, _UNCOUNTED)

    def end(self) -> None:
        """Let the thread send the missing rows, and end."""
        self._ending.set()

    def stop_sending(self) -> None:
        """Stop sending; unsent rows are left to `polytrain sync`."""
        if self.is_alive():
            self._has_stopped_sending = True
            self._warn_of_the_rest("it takes too long")

    def run(self) -> None:
        """Send rows until the run has ended and none is missing."""
        wait_s = 0.0
        while not self._ending.wait(wait_s):
            try:
                self._send()
                wait_s = _SEND_EVERY_S
            except RunOwnedError:
                break
            except Exception as error:
                if isinstance(error, StoreBehindError):
                    self._needs_journal = True
                    self._release()
                elif not isinstance(error, _JournalBehindError):
                    self._warn(error)
                wait_s = min(max(2 * wait_s, _SEND_EVERY_S), _RETRY_AFTER_AT_MOST_S)
        # No time limit: the end of the run sets it, and the thread ends with the process.
        self._ending.wait()
        try:
            self._check_lease()
            self._send_rest()
        except RunOwnedError as error:
            logger.warning(
                "The tracker %s is left to another driver: %s", self._tracker.name, error
            )
        except Exception as error:
            if not self._has_stopped_sending:
                self._warn_of_the_rest(_text(error))
        finally:
            self._release()

    def _send(self) -> None:
        if self._delivery is None:
            self._delivery = TrackerDelivery(self._tracker, self._facts)
        delivery = self._delivery
        is_behind = not self._needs_journal and not self._take_queued(delivery)
        if self._needs_journal:
            self._take_journal(delivery)
            is_whole = self._take_queued(delivery)
            if is_behind:
                self._say_lag(delivery)
        else:
            is_whole = True
        self._check_lease()
        delivery.send(is_wanted=lambda: not self._ending.is_set())
        if not is_whole:
            raise _JournalBehindError

    def _send_rest(self) -> None:
        """Send missing rows, from the queue if it has lost no entry, otherwise from the journal."""
        location = self._facts.location
        delivery = self._delivery
        if delivery is not None and not self._needs_journal and self._take_queued(delivery):
            with contextlib.suppress(StoreBehindError):
                delivery.send(is_wanted=self._is_wanted)
                history = read_history(location.open().read_log(JOURNAL))
                if history is not None and self._is_wanted():
                    delivery.finish(history)
                return
        self._release()
        send_missing(self._tracker, location, is_wanted=self._is_wanted)

    def _is_wanted(self) -> bool:
        return not self._has_stopped_sending

    def _take_queued(self, delivery: TrackerDelivery) -> bool:
        """Take the queued entries; return whether none is missing before them."""
        while True:
            with contextlib.suppress(IndexError):
                self._next = self._next or self._queue.popleft()
            if self._next is None:
                return True
            number, entry = self._next
            is_report = isinstance(entry, MetricsReported)
            if isinstance(entry, MetricsReported):
                number, known = entry.n, delivery.missing.known
            else:
                known = self._known
            # Reports are counted from this driver's first entry.
            if number > known or (is_report and not self._known):
                self._needs_journal = True
                return False
            self._next = None
            if number == known:
                delivery.take(entry)
                self._known += not isinstance(entry, _UNCOUNTED)

    def _take_journal(self, delivery: TrackerDelivery) -> None:
        """Take the journal's entries since the run was last started over."""
        delivery.begin_again()
        self._known = 0
        for entry in entries(self._facts.location.open().read_log(JOURNAL)):
            if entry.token >= self._facts.since:
                delivery.take(entry)
                is_own = entry.token == self._own_token
                self._known += is_own and not isinstance(entry, _UNCOUNTED)
        self._needs_journal = False

    def _release(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        with delivery:
            try:
                delivery.keep()
            except OSError as error:
                logger.debug("The position of %s can't be kept: %s", self._tracker.name, error)

    def _say_lag(self, delivery: TrackerDelivery) -> None:
        if not self._has_lagged:
            self._has_lagged = True
            logger.warning(
                "The tracker %s is %s behind. What is missing is sent from the run's journal while "
                "training continues; `polytrain show` says how many are left.",
                self._tracker.name,
                numbered(delivery.missing.ready, "step"),
            )

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
    return f"{type(error).__name__}: {error}".rstrip(".: ")
