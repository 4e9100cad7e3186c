"""Decides which trackers `polytrain sync` sends to.

Anyone who can write to a run's storage may have written the options of its trackers. So a stored
place is used only if it is in the run's directory, or if the user names the same place.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polytrain.config.constraints import path_or_address
from polytrain.storage.location import Location
from polytrain.text.secret_names import holds_credentials
from polytrain.trackers import NAMES
from polytrain.trackers.tracker import Tracker, tracker_class
from polytrain_plugins.close_names import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A destination that the user has given with `--to`."""

    name: str
    place: str | None
    """Path or address; None if only a name was given."""

    @classmethod
    def of(cls, text: str) -> Destination:
        """Read NAME or NAME=PLACE.

        Raises:
            ValueError: there is no such tracker, or nothing that can be a place after "=".
        """
        name, sign, place = text.partition("=")
        if name not in NAMES:
            raise ValueError(
                f"--to: there is no tracker {name!r}. {did_you_mean(name, NAMES)}"
                f"There are: {', '.join(NAMES)}"
            )
        if sign and not place:
            raise ValueError(f"--to {text} names no place: give --to {name}, or --to {name}=PLACE")
        for what, remedy in path_or_address(place) if place else ():
            raise ValueError(f"--to {text}: {what}. {remedy}")
        return cls(name=name, place=place or None)


def chosen(
    kept: Sequence[Tracker], to: Sequence[Destination], directory: Path | None
) -> tuple[list[Tracker], list[Tracker]]:
    """Return the trackers to send to, and those of them that the user must confirm first.

    Args:
        kept: trackers whose options are in the run's storage.
        to: destinations that the user has named; if empty, all kept trackers.
        directory: the run's directory; None if it is in object storage.
    """
    found: list[Tracker] = []
    from_storage: list[Tracker] = [] if to else [*kept]
    for each in to:
        of_name = [tracker for tracker in kept if tracker.name == each.name]
        if each.place is not None:
            same = [tracker for tracker in of_name if _is_at(tracker, each.place)]
            found += same or [tracker_class(each.name)().at(each.place)]
        elif of_name:
            from_storage += of_name
        else:
            found.append(tracker_class(each.name)().resolved())
    found = list(dict.fromkeys([*found, *from_storage]))
    return found, [each for each in from_storage if not _is_users(each, directory)]


def sync_command(tracker: Tracker, location: Location) -> str:
    """Return the command that sends a tracker the rows that it lacks."""
    command = f"polytrain sync {location.address}"
    is_known = _is_users(tracker, Path(location.address) if location.is_local else None)
    # A password isn't kept with the run: the environment must contain the whole address.
    is_secret = holds_credentials(tracker.resolved().place or "")
    return command if is_known or is_secret else f"{command} {to_option(tracker)}"


def to_option(tracker: Tracker) -> str:
    """Return the option that names a tracker with its place."""
    place = tracker.resolved().place
    return f"--to {shlex.quote(tracker.name if place is None else f'{tracker.name}={place}')}"


def _is_users(tracker: Tracker, directory: Path | None) -> bool:
    """Return whether a tracker stays in the run's directory, or is the environment's default."""
    if directory is not None and tracker.resolved().stays_in(directory):
        return True
    own = type(tracker)().resolved().place
    return tracker.resolved().place == own and _is_at(tracker, own)


def _is_at(tracker: Tracker, place: str | None) -> bool:
    return tracker.at(place).options() == tracker.resolved().options()
