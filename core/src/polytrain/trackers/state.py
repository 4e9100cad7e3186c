"""Keeps with a run the state of its trackers, and says how far each lags."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, TypedDict

from polytrain.errors import DamagedFileError
from polytrain.record.entries import Entry
from polytrain.storage.protocol import Storage
from polytrain.storage.typed_json import FileName, Like, Within, fitting, read_json
from polytrain.trackers import NAMES
from polytrain.trackers.rows import Position, TrackedRows
from polytrain.trackers.tracker import Tracker, tracker_class

_DIRECTORY = "trackers"
_FORMAT = 1
_FILE = re.compile(rf"{_DIRECTORY}/([a-z]+)-[0-9a-f]{{8}}\.json")


_LARGEST = 1 << 20
"""Maximum bytes of a state."""

_Text = Annotated[str, Like(r"[^\x00-\x1f\x7f]{0,4096}", "text that can be shown in a line")]
_Option = _Text | bool | int | float | None


class _Written(TypedDict, total=False):
    format: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """A tracker of a run, and its position."""

    tracker: FileName
    options: dict[str, _Option]
    position: Position = field(default_factory=Position)
    key: Annotated[str, Like("[0-9a-f]{16}", "a tracker's key")] = field(
        default_factory=lambda: secrets.token_hex(8)
    )
    """A unique key by which searchable stores find their run."""

    run_id: _Text = ""
    """The tracker's id of the run."""

    concluded: Annotated[int, Within(-1, 2**62)] = -1
    """Fencing token of the driver whose conclusion was sent; -1 if none."""

    @classmethod
    def of(cls, tracker: Tracker) -> TrackerState:
        """Return the state of a tracker without any rows."""
        return cls(tracker=tracker.name, options=tracker.options())

    @property
    def file(self) -> str:
        """The state's path in the run's storage."""
        options = json.dumps(self.options, sort_keys=True).encode()
        return f"{_DIRECTORY}/{self.tracker}-{hashlib.sha256(options).hexdigest()[:8]}.json"

    def started_at(self, since: int) -> Position:
        """Return its position in the run that this driver started, or started over."""
        is_same = self.position.since == since
        return self.position if is_same else Position(since=since)

    def started_over(self, since: int, *, can_rewind: bool) -> TrackerState:
        """Return the state for a run that was started over; a store that can rewind is reused."""
        if can_rewind:
            position = Position(since=since, sent=self.position.sent)
            return replace(self, position=position, concluded=-1)
        return TrackerState(
            tracker=self.tracker, options=self.options, position=Position(since=since)
        )

    def write(self, storage: Storage) -> None:
        """Store the state with the run.

        Raises:
            OSError: the storage can't be written.
        """
        storage.write(self.file, json.dumps({"format": _FORMAT, **asdict(self)}).encode())


def kept_state(storage: Storage, tracker: Tracker) -> TrackerState:
    """Return the state of a run's tracker; a new one if it has none.

    Raises:
        OSError: the storage can't be read.
        ValueError: the state is damaged, or of a newer version.
    """
    new = TrackerState.of(tracker)
    try:
        return _read(storage, new.file, type(tracker))
    except FileNotFoundError:
        return new


def kept_trackers(storage: Storage) -> Iterator[Tracker]:
    """Yield the trackers that a run has had.

    Raises:
        OSError, ValueError: as `kept_state`.
    """
    for path, kind in _files(storage):
        state = _read(storage, path, kind)
        known = {each.name for each in fields(kind)}
        # Ignore options of other versions of the tracker.
        given = {name: value for name, value in state.options.items() if name in known}
        yield fitting(kind, given, file=f"{path}, options")


def _files(storage: Storage) -> Iterator[tuple[str, type[Tracker]]]:
    for path in sorted(storage.list(_DIRECTORY)):
        named = _FILE.fullmatch(path)
        if named is not None and named[1] in NAMES:
            yield path, tracker_class(named[1])


def _read(storage: Storage, path: str, kind: type[Tracker]) -> TrackerState:
    written = read_json(_Written, storage.read(path, at_most=_LARGEST), file=path)
    found = written.pop("format", None)
    if found != _FORMAT:
        raise ValueError(f"{path} has the format {found}, and this version reads {_FORMAT}")
    state = fitting(TrackerState, written, file=path)
    if state.tracker != kind.name:
        raise DamagedFileError(path, "tracker", f"is {state.tracker!r}, not {kind.name!r}")
    if state.run_id and not re.fullmatch(kind.run_ids, state.run_id):
        raise DamagedFileError(path, "run_id", f"is {state.run_id!r}, no id of {kind.name}")
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLag:
    """The lag of one tracker of a run."""

    name: str
    step: int
    """The last step that it is known to have, noted every few seconds by an active run."""

    lacks: int
    """Number of later steps that are ready for it. MLflow and W&B get a step once no restart can
    undo it: see `TrackedRows`."""

    damage: str | None = None
    """Why its state can't be read; None if it can."""


def lags(storage: Storage, journal: Iterable[Entry], *, since: int) -> tuple[TrackerLag, ...]:
    """Read the lag of each tracker.

    Args:
        journal: the entries of its journal.
        since: fencing token of the driver that started the run, or started it over.

    Raises:
        OSError: the storage can't be listed.
    """
    found: dict[str, TrackedRows] = {}
    kinds = dict(_files(storage))
    damage: dict[str, str] = {}
    for file, kind in kinds.items():
        try:
            # Positions from before the run was started over don't count.
            position = _read(storage, file, kind).started_at(since)
        except (OSError, ValueError) as error:
            damage[file] = str(error)
        else:
            found[file] = TrackedRows(position, can_rewind=kind.can_rewind)
    if not found and not damage:
        return ()
    for entry in journal:
        if entry.token >= since:
            for rows in found.values():
                rows.take(entry)
    return tuple(
        TrackerLag(name=kind.name, step=0, lacks=0, damage=damage[file])
        if file in damage
        else TrackerLag(name=kind.name, step=found[file].sent, lacks=found[file].ready)
        for file, kind in kinds.items()
    )
