"""Checks whether an agent's node can use the run's storage, before the node gets a worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from polytrain.storage.beneath import Beneath
from polytrain.storage.checks import refusal
from polytrain.storage.location import Location
from polytrain.storage.retry import is_temporary

_SEEN_WITHIN_S = 5.0
"""Seconds within which a network file system shows a new file."""

_REACHED_WITHIN_S = 30.0
"""Seconds for which an address that the driver has just written to is tried again."""

_PAUSE_S = 0.1


class StorageCheck:
    """The check of one node. Agents that need it at the same time share it; later ones repeat it.

    It runs on an event loop, and the storage is used in a thread.
    """

    def __init__(self, location: Location, marker: str, *, host: str) -> None:
        """
        Args:
            location: the run's location.
            marker: the path in it of a file that the driver has written.
            host: this node, for messages.
        """
        self._arguments = location, marker, host
        self._running: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Return the problem of the run's storage on this node; None if there is none."""
        if self._running is None or self._running.done():
            check = asyncio.to_thread(storage_problem, *self._arguments)
            self._running = asyncio.get_running_loop().create_task(check)
        # An agent that ends doesn't cancel it for the others.
        return await asyncio.shield(self._running)


def storage_problem(location: Location, marker: str, host: str) -> str | None:
    """Return the problem of the run's storage on this node; None if there is none.

    Args:
        location: the run's location.
        marker: the path in it of a file that the driver has written.
        host: this node, for the message.
    """
    # Only a path can mean another storage here.
    unseen = _unseen(location, marker, host) if location.is_local else None
    if unseen is not None:
        return unseen
    if not location.is_local:
        # A temporary error looks like that of a wrong server.
        location = replace(location, retry_s=min(location.retry_s, _REACHED_WITHIN_S))
    refused = refusal(location)
    return None if refused is None else f"the node {host} {refused.what}. {refused.remedy}"


def _unseen(location: Location, marker: str, host: str) -> str | None:
    """Return why this node doesn't see the driver's file; None if it does."""
    began, files = time.monotonic(), Beneath(Path(location.address))
    while (error := _error_of(files, marker)) is not None:
        is_unseen = isinstance(error, FileNotFoundError)
        limit_s = _SEEN_WITHIN_S if is_unseen else location.retry_s * is_temporary(error)
        if time.monotonic() - began <= limit_s:
            time.sleep(_PAUSE_S)
        elif is_unseen:
            return (
                f"the node {host} doesn't see the run's directory {location.address}, which the "
                "driver has made. Set RunConfig.storage_path to a directory that all nodes mount, "
                "or to object storage such as s3://bucket"
            )
        else:
            return f"the node {host} can't read the run's directory {location.address}: {error}"
    return None


def _error_of(files: Beneath, marker: str) -> OSError | None:
    try:
        files.status(marker)
    except OSError as error:
        return error
    return None
