"""What is kept of a tracker with the run: its options, its own run id, how far it is."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from polytrain.run.tracked_rows import Position
from polytrain.storage.protocol import Storage
from polytrain.trackers import NAMES
from polytrain.trackers.names import tracker_class
from polytrain.trackers.tracker import Tracker

_DIRECTORY = "trackers"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """A tracker of a run, and how far it is."""

    tracker: str
    options: dict[str, Any]
    position: Position = field(default_factory=Position)
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Unique: stores that can be searched find their run by it."""

    run_id: str = ""
    """What the tracker calls the run."""

    concluded: int = -1
    """Token of the driver whose conclusion was sent."""

    @classmethod
    def of(cls, tracker: Tracker) -> TrackerState:
        """The state of a tracker that has nothing yet."""
        return cls(tracker=tracker.name, options=tracker.options())

    @property
    def file(self) -> str:
        """Its path in the run's storage."""
        options = json.dumps(self.options, sort_keys=True).encode()
        return f"{_DIRECTORY}/{self.tracker}-{hashlib.sha256(options).hexdigest()[:8]}.json"

    def started_over(self, since: int, *, can_rewind: bool) -> TrackerState:
        """The state for a run that was started over: a store that can be emptied is used again."""
        if can_rewind:
            position = Position(since=since, sent=self.position.sent)
            return replace(self, position=position, concluded=-1)
        return TrackerState(
            tracker=self.tracker, options=self.options, position=Position(since=since)
        )

    def write(self, storage: Storage) -> None:
        """Keep it.

        Raises:
            OSError: the storage can't be written.
        """
        storage.write(self.file, json.dumps({"format": _FORMAT, **asdict(self)}).encode())


def kept_state(storage: Storage, tracker: Tracker) -> TrackerState:
    """Return the state of a run's tracker; a new one if it has none.

    Raises:
        OSError: the storage can't be read.
        ValueError: it is damaged, or of a newer version.
    """
    new = TrackerState.of(tracker)
    try:
        return _read(storage, new.file)
    except FileNotFoundError:
        return new


def kept_trackers(storage: Storage) -> Iterator[Tracker]:
    """Yield the trackers that a run has had.

    Raises:
        OSError, ValueError: as `kept_state`.
    """
    for path in sorted(storage.list(_DIRECTORY)):
        if path.endswith(".json"):
            state = _read(storage, path)
            if state.tracker in NAMES:
                yield tracker_class(state.tracker).with_options(state.options)


def _read(storage: Storage, path: str) -> TrackerState:
    content = json.loads(storage.read(path))
    found = content.pop("format", None)
    if found != _FORMAT:
        raise ValueError(f"{path} has the format {found}, and this version reads {_FORMAT}")
    try:
        return TrackerState(**{**content, "position": Position(**content["position"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
