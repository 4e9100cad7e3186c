"""Requests of commands to the driver of a run that is active."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from polytrain.errors import DamagedFileError
from polytrain.record.state import RunState
from polytrain.run.requests import NoAnswerError, RequestKind, ask
from polytrain.view.cli.found import FoundRun

_TIMEOUT_S = 60.0


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
        return ask(storage, run.holder.token, kind, timeout_s=_TIMEOUT_S, reason=reason)
    except NoAnswerError as error:
        raise click.ClickException(
            f"{name}: {error}. It is {run.holder.description}: is that process alive?"
        ) from error
    except (OSError, DamagedFileError) as error:
        raise click.ClickException(f"{run.location.address} can't be used: {error}") from error
