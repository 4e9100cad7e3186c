"""`polytrain runs`: the runs of a storage, the latest last."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polytrain.output.echo import echo, echo_lines
from polytrain.output.line_layout import columns, padded, printable
from polytrain.storage import DEFAULT_STORAGE
from polytrain.view.cli.found import (
    NotFound,
    as_json,
    print_json,
    read_run,
    readable,
    storage_at,
)

if TYPE_CHECKING:
    from polytrain.storage.location import Location
    from polytrain.view.present import PresentRun

UNREADABLE = "unreadable"
"""The state of a run whose journal can't be read, for example because its version is another."""

_COLUMNS = (
    *("name", "state", "backend", "workers", "reports", "restarts", "launched", "metrics"),
    *("goodput", "reason"),
)


@click.command("runs")
@click.argument("storage", default=DEFAULT_STORAGE)
@as_json
def command(storage: str, as_json: bool) -> None:
    """List the runs of STORAGE, a directory or an address (~/polytrain_results)."""
    from polytrain_plugins.close_names import did_you_mean_file

    location = storage_at(storage, "STORAGE")
    with readable(location):
        if location.is_local and storage != DEFAULT_STORAGE and not Path(location.address).is_dir():
            if Path(location.address).exists():
                raise NotFound(f"{location.address} is a file. Give a directory of runs.")
            meant = did_you_mean_file(Path(location.address))
            raise NotFound(f"There is no directory {location.address}. {meant}".strip())
        names = list(_names(location))
    rows = [row for name in names if (row := _row_of(name, location.below(name))) is not None]
    rows.sort(key=lambda row: row["launched"] or 0.0)
    if as_json:
        print_json("runs", rows)
    elif not rows:
        echo(f"There are no runs in {location.address}.")
    else:
        _print(rows)


def _names(location: Location) -> Iterator[str]:
    if location.is_local:
        # Not by the storage, which lists the files of all checkpoints.
        from polytrain.record.near_runs import runs_in

        yield from runs_in(Path(location.address))
        return
    from polytrain.record.history import JOURNAL

    paths = (path.split("/") for path in location.open().list(""))
    yield from {first for first, *rest in paths if rest and rest[0].startswith(JOURNAL)}


def _row_of(name: str, location: Location) -> dict[str, Any] | None:
    """The row of a run; None if there is none. One that can't be read doesn't hide the others."""
    try:
        run = read_run(location)
    except click.ClickException as error:
        return {**dict.fromkeys(_COLUMNS), "name": name, "state": UNREADABLE, "reason": str(error)}
    return None if run is None else _row(name, run)


def _row(name: str, run: PresentRun) -> dict[str, Any]:
    first = next(iter(run.history.attempts), None)
    return {
        "name": name,
        "state": run.state,
        "backend": run.history.identity["backend"],
        "workers": run.history.world_size,
        "reports": len(run.history.reports),
        "restarts": run.history.ledger.restarts,
        "launched": None if first is None else first.launched,
        "metrics": dict(run.history.metrics),
        "goodput": run.history.ledger.goodput,
        "reason": run.history.reason,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from polytrain.output.metric_texts import metrics_text

    table = [("NAME", "STATE", "BACKEND", "STARTED", "REPORTS", "RESTARTS", "METRICS")]
    for row in rows:
        launched = row["launched"]
        table.append(
            (
                printable(row["name"]),
                row["state"],
                printable(row["backend"] or ""),
                f"{datetime.fromtimestamp(launched):%Y-%m-%d %H:%M}" if launched else "",
                _number(row["reports"]),
                _number(row["restarts"]),
                metrics_text(row["metrics"] or {}),
            )
        )
    widths = [max(map(columns, column)) for column in zip(*table, strict=True)]
    for line in table:
        echo("  ".join(map(padded, line, widths)).rstrip())

    for row in rows:
        if row["state"] == UNREADABLE:
            echo_lines(row["reason"], err=True)


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
