"""The run that a command line names, and how what is found is printed.

Commands import this at once. What reads a run is imported when one is read: `--help` and a wrong
command line need none of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo_lines
from polytrain.record.state import RunState, state_of

if TYPE_CHECKING:
    from polytrain.record.entries import Entry
    from polytrain.record.history import RunHistory
    from polytrain.run.lease import Holder
    from polytrain.storage.location import Location
    from polytrain.trackers.lag import TrackerLag

DEFAULT_STORAGE = "~/polytrain_results"

FAILED = 1
NOT_FOUND = 3
CAN_RESUME = 75

SCHEMA_VERSION = 1
"""Of all `--json` output; a change that breaks its readers raises it."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def _run_names(context: click.Context, argument: click.Argument, begun: str) -> list[str]:
    """The runs in the usual place, for a shell that completes."""
    found = runs_in(Path(DEFAULT_STORAGE).expanduser())
    # A shell prints them as they are.
    return [name for name in found if name.startswith(begun) and name.isprintable()]


def runs_in(directory: Path) -> list[str]:
    """Return the names of the directories that have a journal; each may be a link to a run.

    Raises:
        OSError: the directory can't be read.
    """
    from polytrain.record.history import JOURNAL

    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if os.path.lexists(directory / name / JOURNAL))


run_argument = click.argument("run", shell_complete=_run_names)
"""The run that a command is about."""


class RunNotFound(click.ClickException):
    """There is no run where one was named."""

    exit_code = NOT_FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run in its storage."""

    location: Location
    history: RunHistory
    holder: Holder | None

    @property
    def state(self) -> RunState:
        """What has become of it."""
        return state_of(self.history, self.holder)

    @property
    def exit_code(self) -> int:
        """That of a command which was asked for the run's state."""
        if self.state.can_resume:
            return CAN_RESUME
        return FAILED if self.state is RunState.FAILED else 0

    def entries(self) -> Iterator[Entry]:
        """Yield what its journal holds."""
        from polytrain.record.history import JOURNAL, entries

        return entries(self.location.open().read_log(JOURNAL))

    def trackers(self) -> Sequence[TrackerLag]:
        """Return how far its trackers are.

        Raises:
            click.ClickException: that can't be read.
        """
        from polytrain.trackers.lag import lags

        since = self.history.since_token
        try:
            return lags(self.location.open(), self.entries(), since=since)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{self.location.address} can't be read: {error}") from error


def named_run(name: str) -> FoundRun:
    """Return the run of this path, address or name.

    Raises:
        RunNotFound: there is none.
        click.ClickException: it can't be read.
    """
    from polytrain.record.history import JOURNAL
    from polytrain.storage.location import Location, is_address

    places = [name]
    if not is_address(name) and os.sep not in name:
        places.append(f"{DEFAULT_STORAGE}/{name}")
    for place in places:
        found = read_run(Location.of(place, retry_s=0))
        if found is not None:
            return found
    raise RunNotFound(
        f"There is no run in {' or '.join(places)}: a run has a {JOURNAL}. `polytrain runs "
        "STORAGE` lists those of a storage."
    )


def read_run(location: Location) -> FoundRun | None:
    """Return the run in a location; None if there is none.

    Raises:
        click.ClickException: it can't be read.
    """
    from polytrain.record.history import RunHistory
    from polytrain.view.present import read_present
    from polytrain_plugins import PolytrainError

    try:
        present = read_present(RunHistory, location.open())
    except NotADirectoryError:
        # A file, such as the journal itself.
        return None
    except (OSError, PolytrainError) as error:
        raise click.ClickException(f"{location.address} can't be read: {error}") from error
    if present is None:
        return None
    history, owner = present
    return FoundRun(location=location, history=history, holder=owner)


def print_json(command: str, data: Any) -> None:
    """Print what a command has found, as JSON that every reader takes."""
    from polytrain.text import strict_json

    answer = {"schema_version": SCHEMA_VERSION, "command": command, "data": data}
    echo_lines(json.dumps(strict_json.plain(answer), indent=2))
