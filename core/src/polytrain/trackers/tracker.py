"""The interface of trackers: stores of metrics that get a run's rows."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

import polytrain.trackers
from polytrain.checkpoint.manifest import Manifest
from polytrain.config.constraints import path_or_address
from polytrain.output.observers import RecordFollower
from polytrain.trackers.description import Description
from polytrain_plugins import Problem
from polytrain_plugins.installed import install_command

_PATHS = ("path", "directory")
"""Options that may be a `Path`."""

_KINDS: Mapping[str, tuple[Any, str]] = {
    "bool": (bool, "a bool, True or False"),
    "str | None": (str | None, "text, or leave it out"),
    "path": (str | Path | None, "a path, or leave it out"),
}
"""Type of an option, or "path" → the values that it takes, and what to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rank 0's report at one step."""

    step: int
    time: float
    """Time at which the driver received the report, in seconds since the epoch."""

    metrics: Mapping[str, Any]
    """Flat metrics: a metric `b` in a metric `a` is `a/b`."""

    validation: Row | None = None
    """Metrics of a validation of this or an earlier step, if the store can't add to that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run whose rows are sent."""

    name: str
    address: str
    """The run's directory or address."""

    key: str
    """Unique to the run and the tracker; the same for every driver of the run."""

    run_id: str
    """The tracker's earlier id of the run; empty if there is none."""

    directory: Path | None = None
    """The run's directory; None if it is in object storage."""

    manifest_of: Callable[[str], Manifest | None] = lambda _: None
    """Returns the manifest of the checkpoint at an address; None if it is gone."""


class Sink(Protocol):
    """An open store, used by one thread. Any exception means that rows must be sent again later."""

    @property
    def run_id(self) -> str:
        """The tracker's id of the run."""

    @property
    def sent(self) -> int | None:
        """The last step that the store holds; None if that is unknown."""

    def describe(self, description: Description) -> None:
        """Record what the run was started with.

        It may be called again: when more is known, or by a driver that resumes the run with others.
        """

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows with ascending steps. After an exception the same rows may be sent again."""

    def rewind(self, step: int) -> None:
        """Remove all rows after this step, if the tracker `can_rewind`."""

    def amend(self, row: Row) -> None:
        """Add the metrics of a validation to an earlier step.

        If the tracker can't, add a row of their own: no other follows.
        """

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        """Record the end of the run. It may be called again, after a resumed run's end.

        Args:
            summary: flat figures of the whole run.
            succeeded: whether the run has finished.
        """

    def close(self) -> None:
        """Release everything. All earlier writes are then in the store."""


@dataclass(frozen=True)
class Tracker(RecordFollower, ABC):
    """A store of experiments, and its options. Its fields are plain values."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that the tracker imports."""

    run_ids: ClassVar[str] = r".*"
    """Pattern of its run ids. Kept ids are checked, since they are untrusted."""

    can_rewind: ClassVar[bool] = False
    """Whether rows can be removed. If so, rows are sent as soon as they are reported; otherwise
    when no restart can undo them."""

    can_amend: ClassVar[bool] = True
    """Whether metrics can be added to an earlier row. If not, later rows take them with them."""

    reopens: ClassVar[bool] = False
    """Whether a run that has ended is active in the store again, or a new one, once it is opened.
    If so, its end is sent again."""

    @property
    def has_system_metrics(self) -> bool:
        """Whether its rows also have how busy the ranks were before."""
        return bool(getattr(self, "system_metrics", False))

    @property
    def is_rewritten(self) -> bool:
        """Whether a closed store can't be continued, only replaced by a complete one."""
        return False

    @abstractmethod
    def open(self, run: TrackedRun) -> Sink:
        """Open the store. This imports its library."""

    def problems(self) -> Iterator[Problem]:
        """Yield problems of its options, and modules that are missing on this machine."""
        missing = [module for module in self.requires if find_spec(module) is None]
        if missing:
            yield Problem(
                field=type(self).__name__,
                what=f"it needs {' and '.join(missing)}, which isn't installed",
                remedy=install_command(f"pip install 'polytrain[{self.name}]'"),
            )
        for option in fields(self):
            value = getattr(self, option.name)
            of = "path" if option.name in _PATHS else str(option.type)
            kind, remedy = _KINDS.get(of, (object, ""))
            # What is kept of it has to be a line of text.
            is_wrong = isinstance(value, str) and not re.fullmatch(r"[^\x00-\x1f\x7f]+", value)
            if not isinstance(value, kind) or (remedy and is_wrong):
                yield Problem(
                    field=f"{type(self).__name__}.{option.name}",
                    what=f"{value!r} is not {remedy.partition(',')[0]}",
                    remedy=f"Give {remedy}",
                )
            elif of == "path" and value is not None:
                for what, remedy in path_or_address(value):
                    yield Problem(
                        field=f"{type(self).__name__}.{option.name}", what=what, remedy=remedy
                    )

    def place_problems(self, address: str, *, is_directory: bool) -> Iterator[Problem]:
        """Yield the tracker's problems with a run that is stored at this address."""
        yield from ()

    def resolved(self) -> Tracker:
        """Return the same tracker, with options that mean the same in any process."""
        return self

    def options(self) -> dict[str, Any]:
        """Return its options without secrets, to be kept with the run."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def place(self) -> str | None:
        """The path or address of a `resolved` tracker's store, PLACE in `polytrain sync`'s `--to`.

        None for the run's own directory.
        """
        return None

    def at(self, place: str | None) -> Tracker:
        """Return the same tracker at another place.

        Other options that are paths or addresses get this process's defaults.
        """
        return self.resolved()

    def stays_in(self, directory: Path) -> bool:
        """Return whether it writes only inside a run's directory, with links resolved."""
        return False


@dataclass(frozen=True)
class FileTracker(Tracker):
    """A tracker that writes files: where the user has said, or in the run's directory."""

    can_rewind: ClassVar[bool] = True

    _option: ClassVar[str]
    """The option that says where."""

    _usual: ClassVar[str]
    """Where in the run's directory it writes by default."""

    @property
    def place(self) -> str | None:
        place: str | None = getattr(self, self._option)
        return place

    def at(self, place: str | None) -> Tracker:
        changed: dict[str, Any] = {self._option: place}
        return replace(self, **changed).resolved()

    def resolved(self) -> Tracker:
        if self.place is None:
            return self
        changed: dict[str, Any] = {self._option: str(Path(self.place).expanduser().absolute())}
        return replace(self, **changed)

    def stays_in(self, directory: Path) -> bool:
        return is_in(directory, self.place or self._usual)

    def place_problems(self, address: str, *, is_directory: bool) -> Iterator[Problem]:
        if self.place is None and not is_directory:
            name = type(self).__name__
            yield Problem(
                field=f"{name}.{self._option}",
                what=f"the run is stored in {address}, which isn't a directory",
                remedy=f'Give a path, for example {name}("{self._usual}")',
            )


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker by its short name.

    Raises:
        KeyError: there is none of this name.
    """
    found: type[Tracker] = getattr(polytrain.trackers, polytrain.trackers.NAMES[name])
    return found


def is_in(directory: Path, path: str | Path) -> bool:
    """Return whether a path, relative to a directory or absolute, is in it, with links resolved."""
    inside = os.path.realpath(directory)
    return Path(os.path.realpath(directory / path)).is_relative_to(inside)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, for stores that hold only numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
