"""Delivers a run's rows to one tracker, and keeps its position with the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manager import is_good
from polytrain.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_manifest
from polytrain.checkpoint.store import CheckpointStore
from polytrain.record.entries import Entry, RunConcluded
from polytrain.record.history import JOURNAL, RunHistory, entries, read_history
from polytrain.record.run_facts import RunFacts
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain.text.metrics import flat
from polytrain.trackers.description import Description, description_of
from polytrain.trackers.rows import Position, TrackedRows
from polytrain.trackers.state import kept_state
from polytrain.trackers.tracker import Sink, TrackedRun, Tracker

_KEEP_EVERY_S = 5.0
"""Seconds between stored positions. Rows sent after the stored position are recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedFacts:
    """The facts of a run that are known before it has rows."""

    location: Location
    since: int
    """Fencing token of the driver that started the run, or started it over."""


class StoreBehindError(Exception):
    """A reopened store lacks rows that were sent; the journal has them."""


class TrackerDelivery:
    """The open connection of one tracker and run. Use it from one thread."""

    def __init__(self, tracker: Tracker, facts: TrackedFacts, *, all_rows: bool = False) -> None:
        """Open the tracker.

        Args:
            all_rows: whether rows that a restart may undo are sent in any case.

        Raises:
            Exception: whatever the tracker or the storage raise.
        """
        self.rows = 0
        """Number of rows that were sent."""

        self._tracker = tracker
        self._facts = facts
        self._started_with = RunFacts()
        self._described: Description | None = None
        """What the open store has."""

        self._storage = facts.location.open()
        self._kept_at = 0.0
        self._kept = state = kept_state(self._storage, tracker)
        if state.position.since != facts.since:
            state = state.started_over(facts.since, can_rewind=tracker.can_rewind)
        self.state = state
        # Keep the state before the store creates its run, to find that if this process dies.
        self._keep()
        self._sink: Sink | None = self._opened()
        self.state = replace(state, run_id=self._sink.run_id)
        position = self.state.position
        if self._sink.sent is not None:
            # The last rows sent may not have been noted; or the store is a new one.
            is_behind = self._sink.sent < position.sent
            if is_behind or tracker.reopens:
                # It lacks the end of the run, too.
                self.state = replace(self.state, concluded=-1)
            amendments = 0 if is_behind else position.amendments
            position = replace(position, sent=self._sink.sent, amendments=amendments)
        self._all_rows = all_rows
        self._take_from(position)
        self._keep()

    def __enter__(self) -> TrackerDelivery:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def begin_again(self) -> None:
        """Prepare to take the journal's entries again, from the first one.

        Raises:
            StoreBehindError: the store was opened again, and lacks rows.
            Exception: whatever the tracker or the storage raise.
        """
        # Open the store first: if it is still unavailable, that fails fast.
        self._open_again()
        self._take_from(self.missing.position)

    def take(self, entry: Entry) -> None:
        """Take the journal's next entry, by a driver since the run was last started over."""
        self.missing.take(entry)
        self._started_with.take(entry)
        if isinstance(entry, RunConcluded):
            self._token = entry.token

    def send(self, *, is_wanted: Callable[[], bool] = lambda: True, is_over: bool = False) -> None:
        """Send the rows that are ready.

        Args:
            is_wanted: returns whether to send another thousand rows.
            is_over: whether no later row can take validations' metrics with it.

        Raises:
            StoreBehindError: the store was opened again, and lacks rows.
            Exception: whatever the tracker or the storage raise.
        """
        self._describe()
        while is_wanted():
            changes = self.missing.next(is_over=is_over)
            if changes.is_empty:
                break
            with self._opened_sink() as sink:
                if changes.rewind is not None:
                    sink.rewind(changes.rewind)
                if changes.rows:
                    sink.write(changes.rows)
                for row in changes.amendments:
                    sink.amend(row)
            self.missing.done(changes)
            self.rows += len(changes.rows)
            self._keep_sometimes()
        self._keep_sometimes()

    def finish(self, history: RunHistory) -> None:
        """Send the end of the run, unless that was sent.

        Raises:
            StoreBehindError: the store was opened again, and lacks rows.
            Exception: whatever the tracker or the storage raise.
        """
        if history.succeeded or self._all_rows or self._tracker.is_rewritten:
            # Validations that are left have ended after the last row was sent.
            self.send(is_over=True)
        if history.succeeded is not None and self.state.concluded != self._token:
            self._open_again()
            assert self._sink is not None
            summary = _summary(history, self._facts)
            self._sink.finish(summary, succeeded=history.succeeded)
            self.state = replace(self.state, concluded=self._token)
        self._release()
        self.keep()

    def keep(self) -> None:
        """Store the tracker's position with the run.

        Raises:
            OSError: the storage can't be written.
        """
        if self.missing.position != self.state.position:
            self.state = replace(self.state, position=self.missing.position)
        self._keep()

    def _take_from(self, position: Position) -> None:
        self.missing = TrackedRows(
            position,
            can_rewind=self._tracker.can_rewind,
            can_amend=self._tracker.can_amend,
            all_rows=self._all_rows,
            has_loads=self._tracker.has_system_metrics,
        )
        self._token = -1
        self._started_with = RunFacts()

    def _describe(self) -> None:
        """Send what the run was started with, unless the open store has it."""
        if not self._started_with.programs:
            return
        description = description_of(self._started_with)
        if description != self._described:
            with self._opened_sink() as sink:
                sink.describe(description)
            self._described = description

    @contextlib.contextmanager
    def _opened_sink(self) -> Iterator[Sink]:
        """Yield the store, opened again if need be; close it after an exception."""
        self._open_again()
        assert self._sink is not None
        try:
            yield self._sink
        except BaseException:
            self._release()
            raise

    def _keep_sometimes(self) -> None:
        if time.monotonic() - self._kept_at > _KEEP_EVERY_S:
            self.keep()

    def _keep(self) -> None:
        self._kept_at = time.monotonic()
        if self._kept != self.state:
            self.state.write(self._storage)
            self._kept = self.state

    def _open_again(self) -> None:
        if self._sink is not None:
            return
        self._sink = self._opened()
        if self._sink.sent is not None and self._sink.sent < self.missing.position.sent:
            self._release()
            raise StoreBehindError(f"{self._tracker} lacks rows that it had")

    def _opened(self) -> Sink:
        self._described = None
        location = self._facts.location
        return self._tracker.open(
            TrackedRun(
                name=location.name,
                address=location.address,
                key=self.state.key,
                run_id=self.state.run_id,
                directory=Path(location.address) if location.is_local else None,
                manifest_of=self._manifest,
            )
        )

    def _manifest(self, address: str) -> Manifest | None:
        name = address.rpartition("/")[2]
        with contextlib.suppress(FileNotFoundError):
            return parse_manifest(self._storage.read(f"checkpoints/{name}/{MANIFEST_NAME}"))
        return None

    def _release(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close()


def send_missing(
    tracker: Tracker,
    location: Location,
    *,
    all_rows: bool = False,
    is_wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Send a tracker the rows that it lacks of a run, and return their number.

    Args:
        location: the run's location. This process holds its lease.
        all_rows: whether rows that a restart may undo are sent in any case.
        is_wanted: returns whether to send another thousand rows.

    Raises:
        Exception: any error of the tracker or the storage.
    """
    storage = location.open()
    history = read_history(storage.read_log(JOURNAL))
    if history is None:
        return 0
    facts = TrackedFacts(location=location, since=history.since_token)
    journal = partial(_since, storage, history.since_token)
    if tracker.is_rewritten and _is_complete(tracker, facts, journal(), all_rows=all_rows):
        return 0
    with TrackerDelivery(tracker, facts, all_rows=all_rows) as delivery:
        for entry in journal():
            delivery.take(entry)
        delivery.send(is_wanted=is_wanted)
        if is_wanted():
            delivery.finish(history)
        return delivery.rows


def _is_complete(
    tracker: Tracker, facts: TrackedFacts, journal: Iterable[Entry], *, all_rows: bool
) -> bool:
    state = kept_state(facts.location.open(), tracker)
    if state.position.since != facts.since:
        return False
    rows = TrackedRows(state.position, can_rewind=tracker.can_rewind, all_rows=all_rows)
    token = -1
    for entry in journal:
        rows.take(entry)
        token = entry.token if isinstance(entry, RunConcluded) else token
    return rows.next().is_empty and state.concluded == token


def _since(storage: Storage, token: int) -> Iterator[Entry]:
    return (entry for entry in entries(storage.read_log(JOURNAL)) if entry.token >= token)


def _newest_checkpoint(history: RunHistory, location: Location) -> str:
    """Return the address of the newest checkpoint that counts; empty if there is none.

    The last one that was committed may hold what has diverged, or be deleted.
    """
    store = CheckpointStore(location=location)
    there = store.find(since_token=history.since_token).manifests
    good = [each.directory for each in there if is_good(each, history.divergences)]
    return store.location_of(good[-1]).address if good else ""


def _summary(history: RunHistory, facts: TrackedFacts) -> Mapping[str, Any]:
    stopped = "stopped" if history.stopped is not None else "failed"
    return flat(
        {
            "state": "finished" if history.succeeded else stopped,
            "reason": history.reason,
            "path": facts.location.address,
            "checkpoint": _newest_checkpoint(history, facts.location),
            "restarts": history.ledger.restarts,
            "lost_steps": history.ledger.lost_steps,
            "goodput": history.ledger.goodput,
            "seconds": history.ledger.seconds,
        }
    )
