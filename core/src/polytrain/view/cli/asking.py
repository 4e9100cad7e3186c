"""Requests of commands to the driver of a run that is active."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from polytrain.errors import DamagedFileError
from polytrain.record.state import RunState
from polytrain.run.lease import holder
from polytrain.run.requests import NoAnswerError, RequestKind, ask
from polytrain.view.cli.found import FoundRun

_TIMEOUT_S = 60.0

_SILENT_S = 30.0
"""Seconds without a heartbeat after which a driver that lives can't be asked in this directory."""


def ask_driver(run: FoundRun, kind: RequestKind, *, reason: str = "") -> Mapping[str, Any]:
    """Request something of a run's driver, and return its answer.

    Raises:
        click.ClickException: the run isn't active, its driver doesn't answer, or its storage can't
            be used.
    """
    name = run.location.name
    if run.state is not RunState.RUNNING or run.holder is None:
        raise click.ClickException(f"{name} isn't active: it is {run.state}")
    storage = run.location.open()
    try:
        _expect_heartbeats(run)
        return ask(storage, run.holder.token, kind, timeout_s=_TIMEOUT_S, reason=reason)
    except NoAnswerError as error:
        _expect_heartbeats(run)
        raise click.ClickException(
            f"{name}: {error}. It is {run.holder.description}: is that process alive?"
        ) from error
    except (OSError, DamagedFileError) as error:
        raise click.ClickException(f"{run.location.address} can't be used: {error}") from error


def _expect_heartbeats(run: FoundRun) -> None:
    """Refuse a copy of an active run's directory: its driver writes to the original."""
    owner = holder(run.location.open())
    if owner is None or not owner.is_held:
        return
    silent_s = time.monotonic() - owner.beat_monotonic
    if silent_s > _SILENT_S:
        raise click.ClickException(
            f"{run.location.address} is a copy of an active run's directory, or its driver is "
            f"suspended: {owner.description}, lives, and hasn't written there for {silent_s:.0f} s."
            " Name the run's own directory, or continue that process."
        )
