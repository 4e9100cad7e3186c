"""The run that a command line names, and how what is found is printed.

Commands import this at once. What reads a run is imported when one is read: `--help` and a wrong
command line need none of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo_lines
from polytrain.storage import DEFAULT_STORAGE
from polytrain.view.run_state import RunState

if TYPE_CHECKING:
    from polytrain.storage.location import Location
    from polytrain.view.present import PresentRun

FAILED = 1
WRONG = 2
NOT_FOUND = 3
CAN_RESUME = 75

SCHEMA_VERSION = 1
"""Of all `--json` output; a change that breaks its readers raises it."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def _run_names(context: click.Context, argument: click.Argument, begun: str) -> list[str]:
    """The runs in the usual place, for a shell that completes."""
    from polytrain.record.near_runs import runs_in

    found = runs_in(Path(DEFAULT_STORAGE).expanduser())
    # A shell prints them as they are.
    return [name for name in found if name.startswith(begun) and name.isprintable()]


run_argument = click.argument("run", shell_complete=_run_names)
"""The run that a command is about."""


class Refused(click.ClickException):
    """What the command line asks for is wrong, such as a job; the command line itself isn't."""

    exit_code = WRONG


@contextmanager
def readable(location: Location, *others: type[Exception]) -> Iterator[None]:
    """Read a run's storage, or what is in it.

    Args:
        others: errors that say so besides those of storages and of polytrain.

    Raises:
        click.ClickException: it can't be read.
    """
    from polytrain.text.secret_names import without_credentials
    from polytrain_plugins import PolytrainError

    wrong: tuple[type[Exception], ...] = (OSError, PolytrainError, *others)
    try:
        yield
    except wrong as error:
        text = str(error).removeprefix(f"{location.address!r}: ")
        says_so = f"{location.address!r} can't be read" in text
        where = without_credentials(location.address)
        shown = text if says_so else f"{where} can't be read: {text}"
        raise click.ClickException(shown) from error


class WholeNumber(click.IntRange):
    """A whole number; click would call it an integer range in its messages."""

    name = "whole number"


class NotFound(click.ClickException):
    """There is no run, or no storage, where one was named."""

    exit_code = NOT_FOUND


def exit_code_of(state: RunState) -> int:
    """Return the exit code of a command that was asked for a run's state."""
    if state.can_resume:
        return CAN_RESUME
    return FAILED if state is RunState.FAILED else 0


def named_run(name: str) -> PresentRun:
    """Return the run of this path, address or name.

    Raises:
        NotFound: there is none.
        click.ClickException: it can't be read.
    """
    from polytrain.storage.location import is_address

    if not name.strip():
        raise click.UsageError("RUN is empty. Give a run's name, directory or address.")
    places = [name]
    if not is_address(name) and os.sep not in name and name not in (".", ".."):
        places.append(f"{DEFAULT_STORAGE}/{name}")
    for place in places:
        found = read_run(storage_at(place, "RUN"))
        if found is not None:
            return found
    raise NotFound(_not_found(places))


def active_check(run: PresentRun) -> Callable[[], bool]:
    """Return a function that says whether the driver that held a run holds it still.

    It reads no journal, which may take long. It raises `click.ClickException` if the storage can't
    be read.
    """
    from polytrain.run.lease import HolderWatch

    watch = HolderWatch(run.holder)

    def is_active() -> bool:
        with readable(run.location):
            return watch.is_held(run.location.open())

    return is_active


def storage_at(place: str, argument: str) -> Location:
    """Return the location of a storage that the command line names."""
    from polytrain.storage.location import Location

    try:
        return Location.of(place, retry_s=0)
    except ValueError as error:
        raise click.UsageError(f"{argument}: {error}") from error


def file_at(place: str, argument: str) -> Path:
    """Return the path of a file or a directory that the command line names."""
    from polytrain.storage.location import expect_path

    try:
        expect_path(place)
    except ValueError as error:
        raise click.UsageError(f"{argument}: {error}") from error
    return Path(place).expanduser()


def _not_found(places: Sequence[str]) -> str:
    """Return that no place has a run, and what may be meant."""
    from polytrain.record.history import JOURNAL
    from polytrain.record.near_runs import (
        damaged_journal_text,
        has_damaged_journal,
        listed,
        names_inside,
        names_near,
    )
    from polytrain.storage.location import Location

    for location in map(Location.of, places):
        if has_damaged_journal(location):
            return damaged_journal_text(location)
    for place in places:
        inside = [f"{place.rstrip('/')}/{name}" for name in names_inside(Location.of(place))]
        if inside:
            return f"{place} is a storage, not a run. Name one of its runs: {listed(inside)}."
    text = f"There is no run in {' or '.join(places)}"
    for place in places:
        storage, slash, _ = place.rstrip("/").rpartition("/")
        near = names_near(Location.of(place))
        if near:
            is_usual = storage == DEFAULT_STORAGE
            meant = near[0] if is_usual else f"{storage}{slash}{near[0]}"
            command = "polytrain runs" if is_usual else f"polytrain runs {storage or '.'}"
            return f"{text}. Did you mean {meant}? `{command}` lists the runs that are there."
    return f"{text}: a run has a {JOURNAL}. `polytrain runs STORAGE` lists those of a storage."


def read_run(location: Location) -> PresentRun | None:
    """Return the run in a location; None if there is none.

    Raises:
        click.ClickException: it can't be read.
    """
    from polytrain.view.present import read_present

    with readable(location):
        try:
            return read_present(location)
        except NotADirectoryError:
            # A file, such as the journal itself.
            return None


def print_json(command: str, data: Any) -> None:
    """Print what a command has found, as JSON that every reader takes."""
    from polytrain.text import strict_json

    answer = {"schema_version": SCHEMA_VERSION, "command": command, "data": data}
    echo_lines(json.dumps(strict_json.plain(answer), indent=2))
